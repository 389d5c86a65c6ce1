"""Pipeline: this rank's part of the model under a schedule, and `execute_pipeline`, which runs it."""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from math import isfinite
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Self
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pipeflow.core.action import Kind
from pipeflow.core.analysis.simulation import require_costs
from pipeflow.core.cost import CostModel
from pipeflow.core.errors import UsageError
from pipeflow.core.schedule import Schedule, require_schedule
from pipeflow.engine.deferral.products import Deferral
from pipeflow.engine.parallel.context import current_context
from pipeflow.engine.parallel.transport.agreement import all_gather_object, told_alike
from pipeflow.engine.runtime.adaptive import Adaptation
from pipeflow.engine.runtime.arguments import arguments_of, compare, fitting_stages, promised, routed
from pipeflow.engine.runtime.compiling import Compiling
from pipeflow.engine.runtime.confirmation import Clipping
from pipeflow.engine.runtime.context_ranks import ALONE
from pipeflow.engine.runtime.devices import place
from pipeflow.engine.runtime.elastic import Tables, elastic_step, require_elastic
from pipeflow.engine.runtime.from_module import priced, stages_from
from pipeflow.engine.runtime.gradients.step_end import Gradients
from pipeflow.engine.runtime.grid_samples import require_known, tile_shape
from pipeflow.engine.runtime.head import head_of, require_sliceable
from pipeflow.engine.runtime.loss import StepCall
from pipeflow.engine.runtime.original import Original, add_hooks, cut_chunks, name_in_module
from pipeflow.engine.runtime.program.compile import Options, Programs
from pipeflow.engine.runtime.program.graphs import require_recordable
from pipeflow.engine.runtime.program.pairs import InTurns, Overlap
from pipeflow.engine.runtime.stage import Names, Stage, names_taken, union
from pipeflow.engine.runtime.step import LossOver, Output, Runner
from pipeflow.engine.stages.blocks import Blocks, Cuts
from pipeflow.engine.stages.criterion import own_loss
from pipeflow.engine.stages.plan import CutPlan
from pipeflow.engine.tensor.balance import balance_losses, balanced_over
from pipeflow.engine.tensor.rules import DEFAULT_RULES, Rule
from pipeflow.engine.tensor.stepping import watch

LOG = logging.getLogger("pipeflow")
KEEPS = (
    "%s, which a custom autograd.Function calls, keeps a tensor in its attribute %r. If the Function's backward reads "
    "it, gradients are wrong, since forwards of other microbatches replace it before: compare the gradients with the "
    "module's own, or train with one microbatch"
)
BALANCES = (
    "%s has a balance loss of a form that is not known, so each replica computes it from its own tokens, and it is not "
    "that of one process. Set config.output_router_logits to False to train without it"
)


TORCH_CLIPS = (
    "torch.nn.utils.clip_grad_norm_ would clip by the norm of this rank's part of the gradient: call "
    "pipeflow.clip_grad_norm_(pipeline, max_norm), or what your trainer has for it"
)
NO_WEIGHTS = (
    "has no weights, so it can have no optimizer: cut the module elsewhere with from_module(..., cuts=[...]), the "
    "names of the blocks after which to cut, or use fewer ranks"
)


class Pipeline(nn.Module):
    """This rank's stages of a model, and the schedule that runs them. All ranks must make their Pipelines together.

    Parameters, `zero_grad` and `state_dict` work as in any module. A Pipeline made by `from_module` also loads its part
    of the whole module's `state_dict`; with tensor ranks, use `load_safetensors`. `execute_pipeline` runs a Pipeline.

    Args:
        chunks: this rank's module, or an nn.ModuleList of its modules, one per stage of
            `schedule.placement.stages_of(rank)`, in that order.
        schedule: the schedule, the same on every rank; it is verified. A call may run another one of its placement.
        criterion: `criterion(output, labels)` returns the mean loss of a microbatch, a scalar tensor. It is needed for
            training. The results of a loss module with `reduction="sum"` are added up over microbatches and replicas.
            Ranks with the last stage hold a criterion that is a module as `criterion`, with its parameters.
        tensor_shape: shape of the tensor that passes between stages, with the microbatch's size as first entry; then no
            shape is sent. If the first entry is None, the size follows from each batch; if it is a number, evaluation
            uses headers. By default headers have the shapes until these repeat, so they may vary and be of trees.
        tensor_dtype: dtype of that tensor; ignored if `tensor_shape` is None.
        weigh: `weigh(labels)` returns what the loss of a microbatch is divided by, such as its tokens. Without
            labels, it gets the batch's entries. By default the criterion's operators say it, or it is an error.
        loss_over: "microbatches", the default, or "batch": then the criterion is called once, with the outputs of all
            microbatches, concatenated along dim 0, and all labels. So it may be any function, such as a contrastive
            loss. The last stage must run all forwards first, as in "gpipe" and "looped-bfs", without replicas.
        stages: indices of the stages that `chunks` were built for, to check them against the schedule's placement.
        overlap: `overlap(forward, backward)` runs a pair: it calls both once, in any order, on any thread or stream,
            and returns when both are done. By default the forward runs first; with expert ranks, both run in turns.
        autocast: dtype of a torch.autocast in which stages and criterion run, by default that of one around
            `execute_pipeline`. Backwards run outside of it.
        gradient_dtype: dtype in which gradients of narrower parameters are added up over microbatches and ranks.
            `.grad` keeps it, for MasterWeights. With fully_shard, set its MixedPrecisionPolicy instead.
        gradient_accumulation_fusion: whether linear layers add to weights' gradients while these are computed, as in
            Megatron-LM. This is faster. It rounds otherwise than torch, but alike under all schedules.
        graph: whether steps that repeat replay CUDA graphs, as the guide to clusters says. It never ran on a GPU.
        cost: times of stages and links, in one unit. Receives are posted earlier by the latency of their link, into
            more buffers, so that no transfer waits for its receiver. By default links take no time.
        routes: pairs of stages (from, to) that are not neighbours, of which the first passes tensors to the second. A
            stage where routes begin returns a tuple: the value for the next stage, then one for each route, in the
            order of destinations. Where routes end, arguments have that order. `from_module` makes its own routes.
        head_slices: slices of tokens in which logits and their loss are computed; see the guide to memory.
        head: name of the module that computes logits; by default what `get_output_embeddings()` returns.

    Attributes:
        loss_scale: factor of gradients, so that none underflows in half precision; a number or a scalar tensor.
        clippings: clipping factors for optimizers that scale the gradients themselves.
        cut: the plan of `from_module`: what each stage receives, sends and owns. None for other Pipelines.

    Chunks and criterion are moved to `context.device`. Modules on the meta device must be given memory and values
    before the first step. Weights that several ranks hold in full get the values of the first of them here: on
    replicas, tensor ranks, and both ranks of a stage in a bidirectional schedule. So do buffers of replicas. Buffers of
    tensor ranks must match, unless the layer's `own_buffers()` names them; see "Tensor parallelism" in the reference.
    Each replica updates its own buffers, such as running statistics. After each step, all replicas get those of the
    first one, as with DistributedDataParallel. A BatchNorm sees one microbatch at a time.

    If the schedule splits backwards, W computes the weight gradients of stock linear, convolution and embedding layers,
    and I computes all others. `deferrals` lists both for each stage; the logger "pipeflow" reports the others.

    A Pipeline cannot be copied; its chunks can be, and they may be compiled or scripted before they are passed in.
    Raises UsageError if the chunks, the schedule and the ranks do not fit each other.
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
        gradient_accumulation_fusion: bool = False,
        graph: bool = False,
        cost: CostModel | None = None,
        routes: Sequence[tuple[int, int]] | None = None,
        loss_over: LossOver = "microbatches",
        head_slices: int | None = None,
        head: str | None = None,
    ) -> None:
        require_schedule(schedule)
        if isinstance(criterion, type):
            raise UsageError(f"criterion is the class {criterion.__name__}: make one, as in {criterion.__name__}()")
        if criterion is not None and not callable(criterion):
            raise UsageError(
                f"criterion must be a function of output and labels, as nn.MSELoss() is, got {criterion!r}"
            )
        super().__init__()
        self.context = context = current_context()
        self.chunks = chunks if isinstance(chunks, nn.ModuleList) else nn.ModuleList([chunks])
        self.schedule = schedule
        self.tables = Tables(self)
        self.alarm = context.alarm
        self.autocast = autocast
        self.loss_scale: float | Tensor = 1.0
        self.clippings: WeakSet[Clipping] = WeakSet()
        self.cut: CutPlan | None = None
        self.names_in_module: frozenset[str] = frozenset()  # of the state dict of the module that `from_module` cut
        add_hooks(self)
        with self.alarm.raised_everywhere():
            self.alarm.expect_slow()
            require_sliceable(head_slices, head, over_batch=loss_over == "batch", graph=graph)
            whole = loss_over == "batch"
            require_known(context.layout, overlap=overlap, loss_over=whole, head_slices=head_slices)
            own = fitting_stages(self.chunks, schedule, context, stages)
            if cost is not None:
                require_costs(schedule, cost)
            last = schedule.placement.num_stages - 1
            has_loss = last in own
            self.criterion = criterion if has_loss and isinstance(criterion, nn.Module) else None
            place(self, context.device)
            modules = dict(zip(own, self.chunks, strict=True))
            promise = promised(tile_shape(tensor_shape, context.layout), tensor_dtype)
            if context.elastic:
                require_elastic(
                    schedule, {"graph=True": graph, 'loss_over="batch"': whole, "overlap=": overlap is not None}
                )
            if graph:
                batchwise = loss_over == "batch"
                require_recordable(context, self.chunks, overlaps=overlap is not None, over_batch=batchwise)
            runs = InTurns(context) if overlap is None and context.experts.size > 1 else overlap
            options = Options(promise, runs, cost, routed(self.chunks, routes, schedule, promise), graph)
            taken = self._agree(options, head_slices, names_taken(modules, options.routes))
            self.gradients = Gradients(self, self._owners(modules), schedule.placement, context, gradient_dtype)
            watched = None if overlap is None else context.device
            heads = {last: head_of(modules[last], head, head_slices)} if head_slices and has_loss else {}
            fuses = gradient_accumulation_fusion
            prepared = {
                stage: Stage(stage, module, watched, options.routes, fuses, heads.get(stage))
                for stage, module in modules.items()
            }
            programs = Programs(schedule.placement, context, prepared, self.gradients, options)
            self.runner = Runner(programs, criterion, weigh, taken, autocast, loss_over)
            if context.adaptive and context.pipeline_size > 1:
                self.runner.adaptation = Adaptation(schedule, context, over_batch=whole)
            self.alarm.holders.add(self.runner)
            self.alarm.add(self.tables)
            watch(self)
            self._log_deferrals()

    def _agree(self, options: Options, head_slices: int | None, takes: Names) -> Names:
        """The names of the batch's entries that at least one rank takes; `takes` are those of this rank. Raises
        UsageError unless all ranks were given the same arguments.
        """
        arguments = arguments_of(self.schedule, options, head_slices)
        arguments["launch(adaptive=)"] = self.context.adaptive
        everyone: list[Any] = all_gather_object(self.context.world, (arguments, takes))
        with told_alike(self.context.world):
            compare([arguments for arguments, _ in everyone])
        return union(names for _, names in everyone)

    def _owners(self, modules: Mapping[int, nn.Module]) -> dict[int, nn.Module]:
        """The owners of parameters, by the stage that computes their gradients."""
        if self.criterion is None:
            return dict(modules)
        last = max(modules)
        return {**modules, last: nn.ModuleList([modules[last], self.criterion])}

    def _log_deferrals(self) -> None:
        if any(action.kind is Kind.W for action in self.schedule.actions(self.context.pipeline_rank)):
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
        loss_over: LossOver = "microbatches",
        overlap: Overlap | None = None,
        autocast: torch.dtype | None = None,
        gradient_dtype: torch.dtype | None = None,
        gradient_accumulation_fusion: bool = False,
        graph: bool = False,
        cost: CostModel | None = None,
        head_slices: int | None = None,
        head: str | None = None,
        rules: Sequence[Rule] = DEFAULT_RULES,
    ) -> Self:
        r"""Makes a Pipeline from a whole module. Each stage runs the module's own forward.

        In a stage's forward, received tensors replace the calls of earlier stages, and it ends after its last block.
        A forward on fake tensors finds what it receives, sends and owns, once for each new shape of a microbatch.

        Args:
            module: the whole module, on the CPU or the meta device, the same on every rank. The Pipeline shares the
                parameters that this rank owns; delete the module to free the others.
            schedule: as in `Pipeline`.
            example: a batch, whose first microbatch is traced. It is a dict of the forward's keywords including labels,
                or `(inputs, labels)`. Inputs are such a dict, the first argument, or a tuple of all arguments.
                `execute_pipeline` then takes batches of these forms, also with other shapes. With a `criterion`, the
                labels of a pair reach the forward only if it names a parameter `labels`.
            cuts: where to cut. "uniform", the default, distributes the blocks evenly. A list of numbers, one per block,
                gives the costs of the blocks, which are balanced. A list of names gives the blocks after which to cut,
                with `:k` for the k-th call of a module.
            blocks: modules after which a cut is possible: a class or its name, or names of modules. By default the
                children of outermost nn.ModuleLists; if too few, also those of nn.ModuleDicts, then of nn.Sequentials.
            criterion: as in `Pipeline`. By default the module's own loss: a scalar output, or the output's `.loss`.
            weigh: as in `Pipeline`. By default, what each term of the loss is divided by is read from the operators of
                the module. A loss that is a sum is added up. A step raises UsageError if it cannot be read.
            loss_over: as in `Pipeline`; "batch" needs a criterion.
            overlap, autocast, gradient_dtype, gradient_accumulation_fusion, graph, head_slices, head: as in `Pipeline`.
            cost: as in `Pipeline`; if it has no `activation_bytes`, those of the plan are used.
            rules: which layers are split over the tensor ranks, and how; with (), none is. Put your own rules first, as
                in `rules=[Rule("attention", r"attn\.qkv", parts=3), *DEFAULT_RULES]`.

        Parameters keep their names in `module`, here and in checkpoints. Parameters that several stages need are tied.
        Parameters that no stage needs belong to the last stage. A buffer is stored by the first stage that needs it.

        All tensor ranks get the state of torch's random generators on the first, so that dropout is the same on all.

        Raises UsageError for a module that cannot be cut; the error names the submodule and the reason. Also raises it
        for fewer blocks than stages, and for an example that cannot be split. With tensor ranks, it raises it for a
        rule of your own that matches nothing, and for a tensor size that does not divide the heads or a width.
        """
        require_schedule(schedule)
        context = current_context()
        balances = balance_losses(module) if isinstance(module, nn.Module) else nullcontext([])
        with context.alarm.raised_everywhere(), balances as forms:
            context.alarm.expect_slow()
            names = frozenset(module.state_dict()) if isinstance(module, nn.Module) else frozenset()
            chunks, plan, planner = stages_from(
                module,
                schedule,
                example,
                context,
                cuts=cuts,
                blocks=blocks,
                autocast=autocast,
                rules=rules,
                has_criterion=criterion is not None,
            )
            if (graph or context.elastic) and any(forms) and context.copies.size > 1:
                raise UsageError(
                    f"{'graph' if graph else 'elastic'}=True does not go together with a balance loss over replicas: "
                    "leave it out, or set config.output_router_logits to False"
                )
        if plan.trace.keepers and schedule.num_microbatches > 1 and context.rank == 0:
            LOG.warning(KEEPS, *plan.trace.keepers[0])
        if not all(forms) and context.copies.size > 1 and context.rank == 0:
            LOG.warning(BALANCES, type(module).__name__)
        if criterion is None and plan.trace.loss is not None:
            criterion = own_loss
        made = cls(
            chunks,
            schedule,
            criterion=criterion,
            weigh=weigh,
            overlap=overlap,
            autocast=autocast,
            gradient_dtype=gradient_dtype,
            gradient_accumulation_fusion=gradient_accumulation_fusion,
            graph=graph,
            cost=priced(cost, plan),
            loss_over=loss_over,
            head_slices=head_slices,
            head=head,
        )
        made.cut, made.runner.read, made.names_in_module = plan, planner.entries.of, names
        made.runner.original = Original(module, made.chunks, tells=context.rank == 0)
        made.runner.balanced = partial(balanced_over, context.copies) if forms else None
        return made

    def train(self, mode: bool = True) -> Self:
        """Sets the mode of the stages, and of the module that `from_module` cut."""
        super().train(mode)
        if self.runner.original is not None:
            self.runner.original.train(mode=mode)
        return self

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Like `nn.Module.named_parameters`; after `from_module`, with the names in the module that was cut."""
        reader = _reader(inspect.currentframe())
        is_torchs = reader is inspect.unwrap(nn.utils.clip_grad_norm_).__code__
        if is_torchs and (self.context.has_part or self.gradients.owners.of):
            raise UsageError(TORCH_CLIPS)
        cut, any_found = cut_chunks(self.chunks), False
        for name, parameter in super().named_parameters(prefix, recurse, remove_duplicate):
            any_found = True
            yield name_in_module(name, prefix, cut), parameter
        if not any_found and reader is Optimizer.__init__.__code__:
            raise UsageError(f"rank {self.context.rank} {NO_WEIGHTS}")

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
        """Compiles this rank's stages with torch.compile when they are next called. Every rank must call it.

        Args:
            blocks: compile the blocks of a stage one by one, so that equal blocks share their code. Blocks are the
                children of the stage's outermost lists of modules, or the blocks of `from_module`. With False each
                stage is compiled whole, which takes longer and is not possible for stages of `from_module`.
            backend, mode, options, fullgraph, dynamic: as in torch.compile.

        With the backends "inductor" and "aot_eager" a compiled backward is split into I and W: W computes the gradients
        of parameters with two or more dimensions. With other backends I computes all gradients of a block.

        Raises UsageError for a mode with CUDA graphs, a stage that is cut within a block, and compiled modules; and for
        a module that was cut over context ranks.
        """
        with self.alarm.raised_everywhere():
            if self.runner.programs.options.graph:
                raise UsageError("a Pipeline with graph=True records its stages itself: compile one without it")
            if self.context.context_size > 1 and self.cut is not None:
                raise UsageError("a cut module waits for context ranks in its attention: do not compile it, " + ALONE)
            compiling = Compiling(backend, mode, options, fullgraph, dynamic)
            compiling.compile(self.runner.stages.values(), self.cut, blocks=blocks)
            self.runner.programs.clear()

    @property
    def offload_folder(self) -> Path | None:
        """The folder for what is offloaded on a CPU; None, the default, for memory. Set it between steps."""
        return self.runner.programs.host.folder

    @offload_folder.setter
    def offload_folder(self, folder: str | os.PathLike[str] | None) -> None:
        self.runner.programs.host.use(folder)

    @property
    def deferrals(self) -> dict[int, Deferral]:
        """For each stage of this rank, which weight gradients are computed in W and which in I."""
        return {index: stage.deferral for index, stage in self.runner.stages.items()}

    def __getstate__(self) -> dict[str, Any]:
        """Raises UsageError: the connections of a rank cannot be copied."""
        raise UsageError(
            "a Pipeline cannot be copied or pickled: copy its chunks, as with copy.deepcopy(model.chunks) or "
            "AveragedModel(model.chunks), and make a Pipeline of the copy on every rank"
        )

    def forward(self, *_: object, **__: object) -> None:
        """Raises UsageError: a rank holds only a part of the model."""
        raise UsageError(
            "a Pipeline cannot be called: run it with pipeflow.execute_pipeline(data_iter, model) on every rank"
        )


def _reader(frame: FrameType | None) -> CodeType | None:
    """The code of the function that reads a generator, directly or through other generators."""
    while frame is not None and frame.f_code.co_flags & inspect.CO_GENERATOR:
        frame = frame.f_back
    return frame and frame.f_code


def execute_pipeline(
    data_iter: Iterator[object],
    model: Pipeline,
    *,
    forward_only: bool = False,
    return_outputs: bool | Callable[[Any], object] = False,
    broadcast_loss: bool = False,
    trace: bool = False,
    reduce: bool = True,
    schedule: Schedule | None = None,
    gradient_scale: float = 1.0,
) -> Output:
    """Runs one step: takes a batch, runs the schedule, and adds the gradients of the batch's mean loss to `.grad`.

    Every rank makes the same call. All ranks of a replica must have the same batch in their iterators; the mean is over
    the batches of all replicas.

    Args:
        data_iter: iterator of `(inputs, labels)`. Tensors are split into microbatches along dim 0; entries wrapped in
            `pipeflow.Along(tensor, dim)` are split along that dimension, and those in `pipeflow.Whole` are not split. A
            `pipeflow.Divided` batch has its microbatches, and may have the schedule that runs them. If `inputs` is a
            dict, each stage receives the entries that its `forward` has parameters for; otherwise `inputs` is the first
            stage's argument. If a batch has fewer samples than the schedule has microbatches, such as the last one of
            an epoch, each sample becomes a microbatch. If inputs require gradients, each rank adds the part of their
            gradients that its own stages compute.
        model: this rank's Pipeline.
        forward_only: evaluate only: no graph is built and no gradient changes. Labels may be None if no loss is needed.
        return_outputs: return the last stage's outputs in `Output.outputs`, joined along dim 0. Or a function that is
            called with the output of each microbatch and returns what to keep of it, in which it wraps what is joined
            along another dimension: `lambda output: pipeflow.Along(output, 1)`.
        broadcast_loss: return the loss on every rank.
        trace: measure the step and return `Output.timeline`.
        reduce: average the gradients over the replicas. With False each replica accumulates its own gradients over
            several calls. The next call with True averages all of them.
        schedule: schedule of this step; by default that of the Pipeline. It must be sound and have the same placement;
            its number of microbatches may differ. Programs are compiled when a schedule is first used, separately for
            training and evaluation; the 16 most recently used ones are kept.
        gradient_scale: factor of the gradients of this call, but not of its loss, the same on every rank. With 1 / n,
            the sum over n calls is the gradient of their mean loss.

    Raises:
        UsageError: on the rank that noticed it, if a batch, a schedule, an output or a loss does not fit. On every
            rank, if the ranks made different calls.
        PipelineError: on every rank, if anything failed on any rank. The error names the rank where it began. Gradients
            are then undefined. The next step works again, unless a rank died.
    """
    if not isinstance(model, Pipeline):
        made = "make one, as in Pipeline.from_module(module, schedule, example=batch, criterion=criterion)"
        raise UsageError(f"execute_pipeline runs a pipeflow.Pipeline, got {type(model).__name__}: {made}")
    if not forward_only and not torch.is_grad_enabled():
        raise UsageError("gradients are disabled here: pass forward_only=True to evaluate")
    if schedule is not None:
        require_schedule(schedule)
    if not isfinite(gradient_scale):
        raise UsageError(f"gradient_scale must be a finite number, got {gradient_scale}")
    adapts = schedule is None and not (forward_only or model.context.is_joined)
    adaptation = model.runner.adaptation if adapts else None
    schedule = schedule or (model.tables.launched if adaptation is None else adaptation.schedule)
    call = StepCall(not forward_only, reduce, return_outputs, broadcast_loss, trace, schedule, gradient_scale)
    call = call._replace(adapts=adaptation is not None and reduce)
    if model.context.elastic:
        output: Output = elastic_step(model, data_iter, call)
        return output
    with model.alarm.raised_everywhere(call):
        return model.runner.step(data_iter, call, model.loss_scale)
