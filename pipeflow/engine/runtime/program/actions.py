"""Actions: a table of the operations that each kind of action becomes. Must not contain: transfers between ranks, which
are in `compile`.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

import torch
from torch.distributed.fsdp import FSDPModule

from pipeflow.core.action import Action, Kind
from pipeflow.core.dataflow import DATAFLOW, Content, Stream, Value
from pipeflow.core.errors import UsageError
from pipeflow.core.route import Routes, sources_of, targets_of
from pipeflow.engine.runtime.gradients.fully_sharded import Unshard, fully_sharded_in, reshard_all
from pipeflow.engine.runtime.gradients.step_end import Gradients
from pipeflow.engine.runtime.program.graphs import GraphedMicrobatch, Graphs
from pipeflow.engine.runtime.program.memory_actions import HeldMicrobatch, MemoryCopy
from pipeflow.engine.runtime.program.microbatches import Microbatch
from pipeflow.engine.runtime.program.operations import Operation, Unawaited, begin, compute
from pipeflow.engine.runtime.program.results import Results
from pipeflow.engine.runtime.program.saved import HostMemory, Saved
from pipeflow.engine.runtime.program.slots import Buffers, Slot
from pipeflow.engine.runtime.stage import Stage

MEMORY_KINDS = frozenset({Kind.C, Kind.O, Kind.L})
"""The kinds of action that change where or whether the tensors are that a forward saved."""


@dataclass(slots=True)
class Shared:
    """The objects that operations of one rank's program share, looked up while the operations are made."""

    stages: Mapping[int, Stage]
    num_stages: int
    device: torch.device
    host: HostMemory
    buffers: Buffers
    training: bool
    gradients: Gradients
    step: Callable[[int], None]  # steps the weights of a stage
    results: Results
    given: list[tuple[object, ...]]  # arguments of the first stage, by microbatch
    routes: Routes
    kinds: Mapping[tuple[int, int, int | None], frozenset[Kind]]  # by stage, microbatch and slice
    graphs: Graphs | None  # if computations are recorded
    slices: int
    slots: defaultdict[Value, Slot] = field(default_factory=lambda: defaultdict(Slot))
    microbatches: dict[tuple[int, int, int | None], Microbatch] = field(default_factory=dict)
    waits: dict[Value, Operation] = field(default_factory=dict)
    threads: dict[Stream, ThreadPoolExecutor] = field(default_factory=dict)  # that copy on a CPU; they end with it
    sources: deque[MemoryCopy] = field(default_factory=deque)  # offloads whose memory is not freed yet

    def microbatch(self, action: Action) -> Microbatch:
        """The microbatch of an action in its stage."""
        place = action.stage, action.microbatch, action.slice
        if place not in self.microbatches:
            self.microbatches[place] = self._made(action, self.kinds[place])
        return self.microbatches[place]

    def _made(self, action: Action, kinds: frozenset[Kind]) -> Microbatch:
        stage, inputs, outputs = self.stages[action.stage], self.inputs(action), self.outputs(action)
        gradients = ([self.slots[_gradient(value)] for value in values] for values in (inputs, outputs))
        sharded = bool(fully_sharded_in(stage.module))
        if sharded and kinds & MEMORY_KINDS:
            raise UsageError(
                f"{action}: stage {action.stage} is under fully_shard, whose weights move in memory: recompute its "
                "blocks with torch.utils.checkpoint, or do not recompute or offload the stage"
            )
        if self.graphs is not None and (sharded or kinds & MEMORY_KINDS):
            raise UsageError(
                f"{action}: graph=True is not possible with stages under fully_shard, nor with a schedule that "
                "recomputes or offloads them: leave one of the two out"
            )
        make: Callable[..., Microbatch] = Microbatch
        if self.graphs is not None:
            make = partial(GraphedMicrobatch, graphs=self.graphs)
        if self.training and kinds & MEMORY_KINDS:
            make = partial(HeldMicrobatch, saved=Saved(action.stage, self.host), drops=Kind.C in kinds)
        return make(
            stage,
            action.microbatch * self.slices + (action.slice or 0),
            [self.slots[value] for value in inputs],
            {value.user: self.slots[value] for value in outputs},
            *gradients,
            self.given,
            self.results,
            self.buffers,
            training=self.training,
            defers=Kind.I in kinds or stage.deferral.fuses,
            fills=sharded or self.slices > 1,  # fully_shard averages, and keys get their gradients, in a backward alone
            slices=self.slices,
        )

    def held(self, action: Action) -> HeldMicrobatch:
        """The microbatch of an action that saves memory."""
        found = self.microbatch(action)
        assert isinstance(found, HeldMicrobatch)
        return found

    def awaited(self, values: Iterable[Value]) -> list[Operation]:
        """The waits for those of `values` that come from another rank."""
        return [self.waits[value] for value in values if value in self.waits]

    def inputs(self, action: Action) -> list[Value]:
        """The values that the action's stage receives from earlier stages, in the order of its arguments."""
        sources = sources_of(action.stage, self.routes)
        return [_activation(source, action.stage, action) for source in sources]

    def outputs(self, action: Action) -> list[Value]:
        """The values that the action's stage passes to later stages, in the order in which it returns them."""
        targets = targets_of(action.stage, self.num_stages, self.routes)
        return [_activation(action.stage, target, action) for target in targets]


def _activation(source: int, target: int, action: Action) -> Value:
    route = None if target == source + 1 else target
    return Value(Content.ACTIVATION, source, action.microbatch, route, action.slice)


def _gradient(activation: Value) -> Value:
    """The value that is the gradient of an activation."""
    target = None if activation.to is None else activation.stage
    return Value(Content.GRADIENT, activation.user, activation.microbatch, target, activation.slice)


def forward(shared: Shared, action: Action) -> list[Operation]:
    """F: takes its input from the batch or from slots, and puts its output into slots or the loss."""
    return [*shared.awaited(shared.inputs(action)), compute(action, shared.microbatch(action).forward)]


def backward(shared: Shared, action: Action) -> list[Operation]:
    """B: takes the gradients of the output, makes those of the input, and adds those of the weights. I: like B, but
    leaves weight gradients for W in layers that can defer them.
    """
    gradients, microbatch = map(_gradient, shared.outputs(action)), shared.microbatch(action)
    call = microbatch.backward if action.kind is Kind.B else microbatch.backward_input
    return [*shared.awaited(gradients), compute(action, call)]


def backward_weight(shared: Shared, action: Action) -> list[Operation]:
    """W: computes the weight gradients that I left."""
    return [compute(action, shared.microbatch(action).backward_weight)]


def reduction(shared: Shared, action: Action) -> list[Operation]:
    """R: sums the stage's weight gradients over the ranks that hold the stage."""
    return [begin(Unawaited(action, partial(shared.gradients.reduce, action.stage)))]


def optimizer_step(shared: Shared, action: Action) -> list[Operation]:
    """S: steps the stage's weights."""
    return [compute(action, partial(shared.step, action.stage))]


def recomputation(shared: Shared, action: Action) -> list[Operation]:
    """C: computes again what the forward saved."""
    return [compute(action, shared.held(action).recompute)]


def copy(shared: Shared, action: Action) -> list[Operation]:
    """O: copies what the forward saved to the host, and frees it. L: copies it back to the device. A thread makes no
    more than one copy at a time.
    """
    saved, stream = shared.held(action).saved, DATAFLOW[action.kind].stream
    move = saved.to_host if action.kind is Kind.O else saved.to_device
    thread = shared.threads.setdefault(stream, ThreadPoolExecutor(1, thread_name_prefix=f"pipeflow {stream}"))
    return [begin(MemoryCopy(action, move, shared.device, thread, shared.sources))]


def unshard(shared: Shared, action: Action) -> list[Operation]:
    """U: gathers the weights of a stage under fully_shard."""
    return [begin(Unshard(action, _fully_sharded(shared, action)))]


def reshard(shared: Shared, action: Action) -> list[Operation]:
    """H: frees the weights that the stage's unshard gathered."""
    return [begin(Unawaited(action, partial(reshard_all, _fully_sharded(shared, action))))]


def _fully_sharded(shared: Shared, action: Action) -> list[FSDPModule]:
    if modules := fully_sharded_in(shared.stages[action.stage].module):
        return modules
    raise UsageError(
        f"{action}: stage {action.stage} is not under fully_shard: apply it before the Pipeline is made, or run "
        "schedule.without_unshards()"
    )


OPERATIONS: dict[Kind, Callable[[Shared, Action], list[Operation]]] = {
    Kind.F: forward,
    Kind.B: backward,
    Kind.I: backward,
    Kind.W: backward_weight,
    Kind.R: reduction,
    Kind.S: optimizer_step,
    Kind.C: recomputation,
    Kind.O: copy,
    Kind.L: copy,
    Kind.U: unshard,
    Kind.H: reshard,
}
"""For each kind, the function that makes its operations. The last operation runs the action; those before it wait."""
