"""Pipeline: this rank's part of the model under a schedule, and `execute_pipeline`, which runs it."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self
from weakref import WeakSet

import torch
from torch import Tensor, nn

from pipeflow.analysis.simulation import require_costs
from pipeflow.core.action import Kind
from pipeflow.core.cost import CostModel
from pipeflow.core.errors import UsageError
from pipeflow.core.schedule import Schedule, require_schedule
from pipeflow.deferral.products import Deferral
from pipeflow.parallel.context import current_context
from pipeflow.parallel.transport.agreement import all_gather_object, told_alike
from pipeflow.runtime.arguments import Arguments, compare, fitting_stages, promised, routed
from pipeflow.runtime.clipping import Clipping
from pipeflow.runtime.compiling import Compiling
from pipeflow.runtime.devices import place
from pipeflow.runtime.from_module import parts_of
from pipeflow.runtime.gradients.step_end import Gradients
from pipeflow.runtime.keywords import Names, names_taken
from pipeflow.runtime.names import name_in_module
from pipeflow.runtime.program.pairs import Overlap
from pipeflow.runtime.programs import Options, Programs
from pipeflow.runtime.stage import Stage
from pipeflow.runtime.state_dict import add_hooks, cut_prefixes
from pipeflow.runtime.step import Runner
from pipeflow.runtime.weighing import UNKNOWN_WEIGHTS, checked, weighing_of
from pipeflow.stages.blocks import Blocks, Cuts
from pipeflow.stages.plan import CutPlan
from pipeflow.tensor.rules import Rule
from pipeflow.tensor.stepping import watch
from pipeflow.tensor.table import DEFAULT_RULES

LOG = logging.getLogger("pipeflow")
KEEPS = (
    "%s, which a custom autograd.Function calls, keeps a tensor in its attribute %r. If the Function's backward reads "
    "it, gradients are wrong, since forwards of other microbatches replace it before: compare the gradients with the "
    "module's own, or train with one microbatch"
)


class Pipeline(nn.Module):
    """This rank's stages of a model, and the schedule that runs them. All ranks must make their Pipelines together.

    Parameters, `zero_grad` and `state_dict` work as in any module. A Pipeline made by `from_module` also loads its part
    of the whole module's `state_dict`; with tensor ranks, use `load_safetensors`. `execute_pipeline` runs a Pipeline.

    Args:
        chunks: this rank's module, or an nn.ModuleList of its modules, one per stage of
            `schedule.placement.stages_of(rank)`, in that order.
        schedule: the schedule of the steps, the same on every rank; it is verified here. `execute_pipeline` accepts
            other schedules of the same placement.
        criterion: `criterion(output, labels)` returns the mean loss of a microbatch, a scalar tensor. It is needed for
            training. The results of a loss module with `reduction="sum"` are added up over microbatches and replicas.
            If the criterion is a module, ranks with the last stage hold it as `criterion`, with its parameters.
        tensor_shape: shape of the tensor that passes between stages, with the microbatch's size as first entry; this
            saves a header per message. If the first entry is None, the size follows from each batch; if it is a number,
            evaluation uses headers. By default shapes are sent in headers, so they may vary, and trees may be passed.
        tensor_dtype: dtype of that tensor; ignored if `tensor_shape` is None.
        weigh: `weigh(labels)` returns the weight of a microbatch in the batch's mean loss, such as its number of
            tokens. By default it is the number of samples. For a loss module with an `ignore_index`, such as
            nn.CrossEntropyLoss, it is the number of labels that are not ignored, each times the `weight` of its class.
            These attributes are read when the Pipeline is made.
        stages: indices of the stages that `chunks` were built for, to check them against the schedule's placement.
        overlap: `overlap(forward, backward)` runs a pair of the schedule. It must call both functions once, in any
            order, on any thread or stream, and return when both are done. By default the forward runs first.
        autocast: dtype of a torch.autocast in which stages and criterion run. By default it is the dtype of a
            torch.autocast around `execute_pipeline`, if there is one. Backwards run outside of it.
        gradient_dtype: dtype in which gradients of narrower parameters are added up over microbatches and ranks.
            `.grad` keeps it, for MasterWeights. With fully_shard, set its MixedPrecisionPolicy instead.
        cost: times of stages and links, in one unit. Receives are posted earlier by the latency of their link, into
            more buffers, so that no transfer waits for its receiver. By default links take no time.
        routes: pairs of stages (from, to) that are not neighbours. The first stage of a pair passes tensors to the
            second, as in skip connections. A stage where routes begin returns a tuple: the value for the next stage,
            then the value for each route, in the order of the destinations. A stage where routes end takes arguments in
            that order: of the previous stage, then of each route. Stages made by `from_module` have their own routes.

    Attributes:
        loss_scale: factor of the gradients of a step, which keeps gradients in half precision from underflowing.
        clippings: clipping factors for optimizers that scale the gradients themselves.
        cut: the plan of `from_module`: what each stage receives, sends and owns. None for other Pipelines.

    Chunks and criterion are moved to `context.device`. Modules on the meta device must be given memory and values
    before the first step. Weights that several ranks hold in full are made equal here, with the values of the first of
    them: on replicas, tensor ranks, and both ranks of a stage in a bidirectional schedule. Buffers of replicas are made
    equal, too. Buffers of tensor ranks must be equal, unless the layer has a method `own_buffers` that names them; see
    "Tensor parallelism" in the reference.

    Each replica updates its own buffers, such as running statistics. After each step, all replicas get the buffers of
    the first one, as with DistributedDataParallel. A BatchNorm sees one microbatch at a time.

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
        cost: CostModel | None = None,
        routes: Sequence[tuple[int, int]] | None = None,
    ) -> None:
        require_schedule(schedule)
        super().__init__()
        self.context = context = current_context()
        self.chunks = chunks if isinstance(chunks, nn.ModuleList) else nn.ModuleList([chunks])
        self.schedule = schedule
        self.alarm = context.alarm
        self.autocast = autocast
        self.loss_scale = 1.0
        self.clippings: WeakSet[Clipping] = WeakSet()
        self.cut: CutPlan | None = None
        self.names_in_module: frozenset[str] = frozenset()  # of the state dict of the module that `from_module` cut
        add_hooks(self)
        with self.alarm.raised_everywhere():
            self.alarm.expect_slow()
            own = fitting_stages(self.chunks, schedule, context, stages)
            if cost is not None:
                require_costs(schedule, cost)
            has_loss = schedule.placement.num_stages - 1 in own
            self.criterion = criterion if has_loss and isinstance(criterion, nn.Module) else None
            place(self, context.device)
            modules = dict(zip(own, self.chunks, strict=True))
            promise = promised(tensor_shape, tensor_dtype)
            options = Options(promise, overlap, cost, routed(self.chunks, routes, schedule, promise))
            taken = self._agree(options, names_taken(modules, options.routes))
            self.gradients = Gradients(self, self._owners(modules), schedule.placement, context, gradient_dtype)
            watched = None if overlap is None else context.device
            prepared = {stage: Stage(stage, module, watched, options.routes) for stage, module in modules.items()}
            programs = Programs(schedule.placement, context, prepared, self.gradients, options)
            weigh = weighing_of(criterion) if weigh is None else weigh
            judged = checked(criterion, context) if weigh is None and schedule.num_microbatches > 1 else criterion
            self.runner = Runner(programs, judged, weigh, taken, autocast)
            self.alarm.holders.add(self.runner)
            watch(self)
            self._log_deferrals()

    def _agree(self, options: Options, takes: Names) -> Names:
        """The names of the batch's entries that at least one rank takes; `takes` are those of this rank. Raises
        UsageError unless all ranks were given the same arguments.
        """
        everyone: list[Any] = all_gather_object(self.context.world, Arguments.of(self.schedule, options, takes))
        with told_alike(self.context.world):
            return compare(everyone)

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
        overlap: Overlap | None = None,
        autocast: torch.dtype | None = None,
        gradient_dtype: torch.dtype | None = None,
        cost: CostModel | None = None,
        rules: Sequence[Rule] = DEFAULT_RULES,
    ) -> Self:
        r"""Makes a Pipeline from a whole module. Each stage runs the module's own forward.

        In the forward of a stage, calls that belong to earlier stages are replaced by the tensors received from them,
        and the forward ends after the stage's last block. What a stage receives, sends and owns is found by running
        the forward on fake tensors, once for each new shape of a microbatch.

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
            criterion: as in `Pipeline`. By default the module's own loss: its output if that is a scalar, or the
                output's `.loss`.
            weigh: as in `Pipeline`. By default, the divisor of the module's own loss, which pipeflow finds in its
                operators: the number of samples, or of labels, with `ignore_index` and class weights. A loss that is a
                sum is added up. If the divisor cannot be found, a warning says how microbatches are weighted.
            overlap, autocast, gradient_dtype: as in `Pipeline`.
            cost: as in `Pipeline`; if it has no `activation_bytes`, those of the plan are used.
            rules: which layers are split over the tensor ranks, and how. Put your own rules first, as in
                `rules=[Rule("attention", r"attn\.qkv", parts=3), *DEFAULT_RULES]`. With () no layer is split, and
                all tensor ranks compute the same.

        Parameters keep their names in `module`, here and in checkpoints. Parameters that several stages need are tied.
        Parameters that no stage needs belong to the last stage. A buffer is stored by the first stage that needs it.

        torch's default random generators on all tensor ranks are set to the state of the first of them, so that stock
        dropout drops the same entries on all.

        Raises UsageError for a module that cannot be cut; the error names the submodule and the reason. Also raises it
        for fewer blocks than stages, and for an example that cannot be split. With tensor ranks, it raises it for a
        rule of your own that matches nothing, and for a tensor size that does not divide the heads or a width.
        """
        require_schedule(schedule)
        context = current_context()
        with context.alarm.raised_everywhere():
            context.alarm.expect_slow()
            names = frozenset(module.state_dict()) if isinstance(module, nn.Module) else frozenset()
            parts = parts_of(
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
        if criterion is None and weigh is None and not parts.knows_weights and context.rank == 0:
            LOG.warning(UNKNOWN_WEIGHTS, "samples" if parts.weigh is None else "labels that count")
        if parts.plan.trace.keepers and schedule.num_microbatches > 1 and context.rank == 0:
            LOG.warning(KEEPS, *parts.plan.trace.keepers[0])
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
        made.cut, made.runner.read, made.names_in_module = parts.plan, parts.read, names
        return made

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Like `nn.Module.named_parameters`; parameters of a module that `from_module` cut keep their names in that
        module.
        """
        cut = cut_prefixes(self.chunks)
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
        """Compiles this rank's stages with torch.compile when they are next called. Every rank must call it.

        Args:
            blocks: compile the blocks of a stage one by one, so that equal blocks share their code. Blocks are the
                children of the stage's outermost lists of modules, or the blocks of `from_module`. With False each
                stage is compiled whole, which takes longer and is not possible for stages of `from_module`.
            backend, mode, options, fullgraph, dynamic: as in torch.compile.

        With the backends "inductor" and "aot_eager" a compiled backward is split into I and W: W computes the gradients
        of parameters with two or more dimensions. With other backends I computes all gradients of a block.

        Raises UsageError for a mode with CUDA graphs, for a stage that is cut within a block, and for modules that are
        already compiled.
        """
        with self.alarm.raised_everywhere():
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
