"""Pipeline: this rank's part of the model under a schedule, and the one call that runs it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from math import isfinite
from typing import Any, Self
from weakref import WeakSet

import torch
from torch import Tensor, nn

from pipeflow.analysis.simulate import require_costs
from pipeflow.core.action import Kind
from pipeflow.core.cost import CostModel
from pipeflow.core.errors import UsageError
from pipeflow.core.schedule import Schedule
from pipeflow.deferral.products import Deferral
from pipeflow.parallel.context import current_context
from pipeflow.parallel.transport.agreement import all_gather_object, told_alike
from pipeflow.runtime.arguments import Arguments, compare, fitting_stages, promised, routed
from pipeflow.runtime.call import Call
from pipeflow.runtime.clipping import Clipping
from pipeflow.runtime.compiling import Compiling
from pipeflow.runtime.devices import place
from pipeflow.runtime.from_module import parts_of
from pipeflow.runtime.gradients.step_end import Gradients
from pipeflow.runtime.keywords import names_taken
from pipeflow.runtime.names import name_in_module
from pipeflow.runtime.program.pairs import Overlap
from pipeflow.runtime.programs import Programs
from pipeflow.runtime.stage import Stage
from pipeflow.runtime.step import Output, Runner
from pipeflow.stages.blocks import Blocks, Cuts
from pipeflow.stages.plan import Plan
from pipeflow.stages.stage import ModuleStage
from pipeflow.tensor.rules import Rule
from pipeflow.tensor.table import DEFAULT_RULES

LOG = logging.getLogger("pipeflow")


class Pipeline(nn.Module):
    """This rank's stages, and the schedule that they run unless a step is given another. Its parameters, `zero_grad`
    and `state_dict` are as of any module; it is run by `execute_pipeline`, not called. All ranks make theirs together.

    Args:
        chunks: this rank's module, or an nn.ModuleList of its modules, one per stage of
            `schedule.placement.stages_of(rank)`, in that order.
        schedule: the same on every rank; it is verified here. `execute_pipeline` takes others of its placement.
        criterion: `criterion(output, labels)` gives the mean loss of a microbatch, a scalar. Needed to train. Where it
            is a module, the ranks that have the last stage hold it as `criterion`: its parameters are the Pipeline's.
        tensor_shape: the shape of what passes between stages, one tensor, its first entry the microbatch's size. With
            None as that entry it follows from each batch, in training and in evaluation; ranks compare the batch's size
            where it is another than before. None for the whole when the shape is not known, differs between stages, or
            is a tree of tensors: then headers tell it, as they do where a batch is evaluated and the first entry is a
            number.
        tensor_dtype: its dtype; without meaning when `tensor_shape` is None.
        weigh: `weigh(labels)` gives the weight of a microbatch in the batch's mean loss, such as its number of
            tokens; by default its number of samples.
        stages: the stages that `chunks` were built for, checked against the schedule's placement.
        overlap: `overlap(forward, backward)` runs a pair of the schedule: it calls both, each once, in any order, on
            any thread or stream, and returns when both are done. Without it a forward runs before its backward.
        autocast: the dtype of a torch.autocast under which stages and criterion run.
        gradient_dtype: in which gradients are added up over microbatches and ranks, where a parameter's own dtype is
            narrower, such as torch.float32 for a model in bfloat16; `.grad` is left in it, for MasterWeights to step
            with. By default the parameter's own. Under fully_shard its MixedPrecisionPolicy says it.
        cost: what the stages and links take, in one unit: where a link's latency is long, receives are posted earlier
            by it, into more buffers, so that no transfer waits for its receiver. By default links take no time.
        routes: pairs of stages (from, to), not neighbours, of which the first hands tensors to the second, as skip
            connections do. A stage at which routes begin returns a tuple: what the next stage gets, then what goes on
            each route, in the order of the stages; one at which routes end takes arguments in the same order: what the
            stage before handed on, then what came on each route. Between two ranks it is sent once, without passing
            through others; on one rank it stays in memory. Stages that `from_module` made know theirs.

    Attributes:
        loss_scale: what the gradients of a step are multiplied by, so that those of half precision do not vanish.
        clippings: what clipping leaves to optimizers that scale gradients themselves.
        cut: what `from_module` planned: per stage, what it receives, sends and owns; None for other Pipelines.

    Chunks and criterion are moved to `context.device`; what is on the meta device is to have been made before the first
    step. What every replica, or every tensor rank, holds whole is made the same here: as on the first of them.

    Where the schedule is bidirectional, each stage is on two ranks: their weights are made the same here, those of
    the lower rank, and each step sums their gradients.

    Weight gradients of stock linear, convolution and embedding layers wait for W where the schedule splits backwards;
    all others come with I. `deferrals` has, per stage, which are which; the log "pipeflow" is told of the others.

    Chunks may be copied, averaged, traced and exported as ever, and be compiled or scripted before they come here; a
    Pipeline itself cannot be copied.

    Raises UsageError when the chunks, the schedule and the ranks do not fit each other.
    """

    def __init__(
        self,
        chunks: nn.Module,
        schedule: Schedule,
        *,
        criterion: Callable[..., Tensor] | None = None,
        tensor_shape: Sequence[int | None] | None = None,
        tensor_dtype: torch.dtype = torch.float32,
        weigh: Callable[..., float] | None = None,
        stages: Sequence[int] | None = None,
        overlap: Overlap | None = None,
        autocast: torch.dtype | None = None,
        gradient_dtype: torch.dtype | None = None,
        cost: CostModel | None = None,
        routes: Sequence[tuple[int, int]] | None = None,
    ) -> None:
        super().__init__()
        context = current_context()
        self.chunks = chunks if isinstance(chunks, nn.ModuleList) else nn.ModuleList([chunks])
        self.schedule = schedule
        self.context = context
        self.alarm = context.alarm
        self.autocast = autocast
        self.loss_scale = 1.0
        self.clippings: WeakSet[Clipping] = WeakSet()
        self.cut: Plan | None = None
        with self.alarm.raised_everywhere():
            self.alarm.expect_slow()
            own = fitting_stages(self.chunks, schedule, context, stages)
            if cost is not None:
                require_costs(schedule, cost)
            has_loss = schedule.placement.num_stages - 1 in own
            self.criterion = criterion if has_loss and isinstance(criterion, nn.Module) else None
            place(self, context.device)
            modules = dict(zip(own, self.chunks, strict=True))
            owners: dict[int, nn.Module] = dict(modules)  # of parameters, by the stage that has their gradients
            if self.criterion is not None:
                owners[own[-1]] = nn.ModuleList([modules[own[-1]], self.criterion])
            promise = promised(tensor_shape, tensor_dtype)
            ways = routed(self.chunks, routes, schedule, promise)
            taken_here = names_taken(modules, ways)
            mine = Arguments.of(schedule, promise, cost, overlaps=overlap is not None, routes=ways, takes=taken_here)
            everyone: list[Any] = all_gather_object(context.world, mine)
            with told_alike(context.world):
                taken = compare(everyone)
            self.gradients = Gradients(self, owners, schedule.placement, context, gradient_dtype)
            precise = _under_autocast(autocast, context.device)
            watched = None if overlap is None else context.device
            prepared = {
                stage: Stage(stage, module, precise(module), watched, ways) for stage, module in modules.items()
            }
            programs = Programs(schedule.placement, context, prepared, self.gradients, promise, overlap, cost, ways)
            loss = None if criterion is None else precise(criterion)
            self.runner = Runner(schedule.placement, context, prepared, self.gradients, programs, loss, weigh, taken)
            self.alarm.holders.add(self.runner)
            if any(action.kind is Kind.W for action in schedule.actions(context.pipeline_rank)):
                for stage, deferral in self.deferrals.items():
                    if deferral.remaining:
                        LOG.info("stage %d: %s", stage, deferral)

    @classmethod
    def from_module(
        cls,
        module: nn.Module,
        schedule: Schedule,
        example: object,
        *,
        cuts: Cuts = None,
        blocks: Blocks = None,
        criterion: Callable[..., Tensor] | None = None,
        weigh: Callable[..., float] | None = None,
        overlap: Overlap | None = None,
        autocast: torch.dtype | None = None,
        gradient_dtype: torch.dtype | None = None,
        cost: CostModel | None = None,
        rules: Sequence[Rule] = DEFAULT_RULES,
    ) -> Self:
        r"""A Pipeline of any module, whose own forward each stage runs: calls that earlier stages have made are
        replaced by what these sent, and the forward ends after the stage's last block. What a stage receives, sends and
        owns is found by following its tensors on fake ones, for each new shape of a microbatch once.

        Args:
            module: the whole of it, on the CPU or the meta device, alike on every rank. The Pipeline shares the
                parameters that this rank owns; let go of the module to free the others.
            schedule: as for a Pipeline.
            example: a batch, of which the first microbatch is traced: a dict of the forward's keywords, labels among
                them, or `(inputs, labels)`, where inputs are such a dict, the first argument, or a tuple of all.
                `execute_pipeline` takes batches of these forms, and of other shapes.
            cuts: "uniform" has as many blocks in each stage; a list of numbers, one a block, is their costs, which are
                balanced; a list of names says after which blocks to cut, with `:k` for the k-th call of a module.
            blocks: after what may be cut: a class or its name, or names of modules. By default the children of
                outermost nn.ModuleLists; without any, of nn.ModuleDicts, or else of nn.Sequentials.
            criterion: as for a Pipeline. Without, the loss is the module's own: its output, if a scalar, or `.loss`
                of it.
            weigh: as for a Pipeline. Without, the module's own loss counts by the labels that are not -100, where it
                is a mean over these.
            overlap, autocast, gradient_dtype: as for a Pipeline.
            cost: as for a Pipeline; without `activation_bytes` it gets those that the stages send.
            rules: which layers the tensor ranks share, and how; a rule of your own comes first, as in
                `rules=[Rule("attention", r"attn\.qkv", parts=3), *DEFAULT_RULES]`. With () all layers stay whole, and
                all tensor ranks compute the same.

        Parameters keep the names that they have in `module`, here and in checkpoints. Those that several stages need
        are tied. Those that none needs belong to the last stage. A buffer is stored by the first stage that needs it.

        Tensor ranks go on from the state in which the first of them has torch's default generators, so that stock
        dropout drops the same on all.

        Raises UsageError for a module that cannot be cut, naming the submodule and the reason, for fewer blocks than
        stages, for an example that cannot be split, for a rule of your own that matches nothing, and for a tensor size
        that does not divide heads or a width.
        """
        context = current_context()
        with context.alarm.raised_everywhere():
            context.alarm.expect_slow()
            parts = parts_of(
                module, schedule, example, context, cuts=cuts, blocks=blocks, autocast=autocast, rules=rules
            )
        made = cls(
            parts.chunks,
            schedule,
            criterion=parts.criterion if criterion is None else criterion,
            weigh=parts.weigh if criterion is None and weigh is None else weigh,
            overlap=overlap,
            autocast=autocast,
            gradient_dtype=gradient_dtype,
            cost=parts.priced(cost),
        )
        made.cut, made.runner.read = parts.plan, parts.read
        return made

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """As of any module; the parameters of one that `from_module` cut have the names that they have there."""
        cut = {f"chunks.{index}." for index, chunk in enumerate(self.chunks) if isinstance(chunk, ModuleStage)}
        for name, parameter in super().named_parameters(prefix, recurse, remove_duplicate):
            yield name_in_module(name, prefix, cut), parameter

    def compile(
        self,
        *,
        blocks: bool = True,
        backend: str | Callable[..., Any] = "inductor",
        mode: str | None = None,
        options: dict[str, Any] | None = None,
        fullgraph: bool = False,
        dynamic: bool | None = None,
    ) -> None:
        """Has torch.compile compile this rank's stages when they are next called. Every rank calls it.

        Args:
            blocks: compile the blocks of a stage one by one, which share their code where they are alike: the children
                of its outermost lists of modules, or what `from_module` took for blocks. Otherwise each stage is
                compiled whole, which takes longer and cannot be had for stages of `from_module`.
            backend, mode, options, fullgraph, dynamic: as torch.compile takes them.

        A compiled backward is split into I and W with the backends "inductor" and "aot_eager": W computes the gradients
        of parameters of two dimensions or more. With others all of a block's gradients come with I.

        Raises UsageError for a mode with CUDA graphs, for a stage that is cut within a block, and for modules that are
        compiled already.
        """
        with self.alarm.raised_everywhere():
            compiling = Compiling(backend, mode, options, fullgraph, dynamic)
            compiling.compile(self.runner.stages.values(), self.cut, blocks=blocks)
            self.runner.programs.clear()

    @property
    def deferrals(self) -> dict[int, Deferral]:
        """Per stage of this rank, which weight gradients can wait for W, and which come with I."""
        return {index: stage.deferral for index, stage in self.runner.stages.items()}

    def __getstate__(self) -> dict[str, Any]:
        """Refuses: what connects a rank to the others has no copy."""
        raise UsageError(
            "a Pipeline cannot be copied or pickled: copy its chunks, as with copy.deepcopy(model.chunks) or "
            "AveragedModel(model.chunks), and make a Pipeline of the copy on every rank"
        )

    def forward(self, *_: object, **__: object) -> None:
        """Refuses: a rank holds a part of the model only."""
        raise UsageError(
            "a Pipeline is not called: run it with pipeflow.execute_pipeline(data_iter, model) on every rank"
        )


def execute_pipeline(
    data_iter: Iterator[object],
    model: Pipeline,
    *,
    forward_only: bool = False,
    return_outputs: bool = False,
    broadcast_loss: bool = False,
    trace: bool = False,
    reduce: bool = True,
    schedule: Schedule | None = None,
    gradient_scale: float = 1.0,
) -> Output:
    """Runs one step: takes one batch, runs the schedule, leaves the gradients of the batch's mean loss in `.grad`,
    added to what was there. Every rank makes the same call; all ranks of one replica have the same batch in their
    iterators, and the batch is those of all replicas together.

    Args:
        data_iter: yields `(inputs, labels)`. Tensors are split into microbatches along dim 0, but for what is
            wrapped in `pipeflow.Whole`. Entries of dict `inputs` reach every stage as the keywords it names; other
            `inputs` are the first stage's argument. Where inputs want a gradient, each rank gives them the part that
            its own stages make.
        model: this rank's Pipeline.
        forward_only: evaluate: no graph is built, no gradient touched; labels may be None when there is no loss. A
            batch of fewer samples than the schedule has microbatches is run as that many microbatches.
        return_outputs: keep the last stage's outputs, for `Output.outputs`.
        broadcast_loss: tell the loss to every rank.
        trace: measure the step, for `Output.timeline`.
        reduce: average the gradients over the replicas. Without, each keeps adding up its own, until a step that
            reduces takes all along: accumulation over several calls.
        schedule: what to run in this step, by default the Pipeline's: any sound schedule of its placement, with any
            number of microbatches. Programs are compiled when a schedule first comes, for training and evaluation
            apart, and the 16 that were used last are kept.
        gradient_scale: the gradients of this call are multiplied by it, but not its loss: 1 / n makes the sum over n
            calls the gradient of their mean loss. The same on every rank.

    Raises:
        UsageError: for a batch, a schedule, an output or a loss that does not fit, on the rank that noticed; on every
            rank when the ranks made different calls.
        PipelineError: on every rank, naming the origin, when anything failed on any rank. Gradients are undefined
            then; the next step is as good as a fresh one, unless a rank died.
    """
    if not isinstance(model, Pipeline):
        raise UsageError(f"execute_pipeline runs a pipeflow.Pipeline, got {type(model).__name__}")
    if not forward_only and not torch.is_grad_enabled():
        raise UsageError("gradients are switched off here: pass forward_only=True to evaluate")
    if not isinstance(schedule, Schedule | None):
        raise UsageError(
            f"schedule must be a pipeflow.Schedule, got {type(schedule).__name__}: make_schedule({schedule!r}, ...)"
        )
    if not isfinite(gradient_scale):
        raise UsageError(f"gradient_scale must be a finite number, got {gradient_scale}")
    schedule = model.schedule if schedule is None else schedule
    call = Call(not forward_only, reduce, return_outputs, broadcast_loss, trace, schedule, gradient_scale)
    with model.alarm.raised_everywhere(call):
        return model.runner.step(data_iter, call, model.loss_scale)


def _under_autocast(
    dtype: torch.dtype | None, device: torch.device
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """What makes a function run under torch.autocast; without a dtype, leaves it as it is."""
    return (lambda function: function) if dtype is None else torch.autocast(device.type, dtype)
