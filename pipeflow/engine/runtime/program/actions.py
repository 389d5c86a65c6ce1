"""Actions: a table of the operations that each kind of action becomes. Must not contain: transfers between ranks, which
are in `compile`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import torch
from torch.distributed.fsdp import FSDPModule

from pipeflow.core.action import Action, Kind
from pipeflow.core.dataflow import DATAFLOW, Content, Stream, Value
from pipeflow.core.errors import UsageError
from pipeflow.core.route import Routes, sources_of, targets_of
from pipeflow.engine.runtime.gradients.fully_sharded import Reshard, Unshard, fully_sharded_in
from pipeflow.engine.runtime.gradients.step_end import Gradients
from pipeflow.engine.runtime.program import operations as ops
from pipeflow.engine.runtime.program.host_memory import HostMemory
from pipeflow.engine.runtime.program.last_stage import LossGradient, ToResults
from pipeflow.engine.runtime.program.memory_actions import (
    ForwardMemory,
    HeldForward,
    Leave,
    MemoryCopy,
    Move,
    Recompute,
)
from pipeflow.engine.runtime.program.payload import BackwardState, Payload
from pipeflow.engine.runtime.program.results import Results
from pipeflow.engine.runtime.program.route_values import (
    FromPayloads,
    GradientShares,
    GradientsOfAll,
    Pairing,
    ToPayloads,
)
from pipeflow.engine.runtime.program.unused import Filled
from pipeflow.engine.runtime.stage import Stage

MEMORY_KINDS = frozenset({Kind.C, Kind.O, Kind.L})
"""The kinds of action that change where or whether the tensors are that a forward saved."""


@dataclass(slots=True)
class Shared:
    """The objects that operations of one rank's program share, looked up by value while the operations are made."""

    stages: Mapping[int, Stage]
    num_stages: int
    device: torch.device
    host: HostMemory
    training: bool
    gradients: Gradients
    step: Callable[[int], None]  # steps the weights of a stage
    results: Results
    positionals: list[tuple[object, ...]]  # arguments of the first stage, by microbatch
    routes: Routes = ()
    deferring: frozenset[tuple[int, int]] = frozenset()  # stages and microbatches whose backward is I and W
    payloads: dict[Value, Payload] = field(default_factory=dict)
    states: dict[tuple[int, int], BackwardState] = field(default_factory=dict)
    waits: dict[Value, ops.Operation] = field(default_factory=dict)
    memories: dict[tuple[int, int], ForwardMemory] = field(default_factory=dict)
    threads: dict[Stream, ThreadPoolExecutor] = field(default_factory=dict)  # that copy on a CPU; they end with it
    sources: deque[MemoryCopy] = field(default_factory=deque)  # offloads whose memory is not freed yet

    def payload(self, value: Value) -> Payload:
        """The payload of a value that is made on this rank."""
        return self.payloads.setdefault(value, Payload())

    def state(self, action: Action) -> BackwardState:
        """The state that the forward of the action's microbatch keeps for its backward."""
        return self.states.setdefault((action.stage, action.microbatch), BackwardState())

    def remember(self, actions: Iterable[Action]) -> None:
        """Makes the forwards that any of `actions` computes again or moves keep what they save in a `ForwardMemory`.
        Raises UsageError for stages under fully_shard.
        """
        kinds: dict[tuple[int, int], set[Kind]] = {}
        for action in actions:
            if action.kind in MEMORY_KINDS:
                kinds.setdefault((action.stage, action.microbatch), set()).add(action.kind)
                if fully_sharded_in(self.stages[action.stage].module):
                    raise UsageError(
                        f"{action}: stage {action.stage} is under fully_shard, whose weights move in memory: recompute "
                        "its blocks with torch.utils.checkpoint, or do not recompute or offload the stage"
                    )
        for place, found in kinds.items():
            state = self.states.setdefault(place, BackwardState())
            self.memories[place] = ForwardMemory(place[0], state, self.host, drops=Kind.C in found)

    def copy(self, action: Action, move: Move) -> MemoryCopy:
        """The operation of a copy. A thread makes no more than one at a time."""
        stream = DATAFLOW[action.kind].stream
        thread = self.threads.setdefault(stream, ThreadPoolExecutor(1, thread_name_prefix=f"pipeflow {stream}"))
        return MemoryCopy(action, move, self.device, thread, self.sources)

    def awaited(self, values: Iterable[Value]) -> list[ops.Operation]:
        """The waits for those of `values` that come from another rank."""
        return [self.waits[value] for value in values if value in self.waits]

    def inputs(self, action: Action) -> list[Value]:
        """The values that the action's stage receives from earlier stages, in the order of its arguments."""
        sources = sources_of(action.stage, self.routes)
        return [_activation(source, action.stage, action.microbatch) for source in sources]

    def outputs(self, action: Action) -> list[Value]:
        """The values that the action's stage passes to later stages, in the order in which it returns them."""
        targets = targets_of(action.stage, self.num_stages, self.routes)
        return [_activation(action.stage, target, action.microbatch) for target in targets]


def _activation(source: int, target: int, microbatch: int) -> Value:
    return Value(Content.ACTIVATION, source, microbatch, None if target == source + 1 else target)


def _gradient(activation: Value) -> Value:
    """The value that is the gradient of an activation."""
    target = None if activation.to is None else activation.stage
    return Value(Content.GRADIENT, activation.user, activation.microbatch, target)


def forward(shared: Shared, action: Action) -> list[ops.Operation]:
    """F: takes its input from the batch or from payloads, and puts its output into payloads or the loss."""
    stage, microbatch = action.stage, action.microbatch
    state = shared.state(action) if shared.training else None
    inputs, outputs = shared.inputs(action), shared.outputs(action)
    sources = [ops.FromPayload(shared.payloads[value], state) for value in inputs]
    sinks = [ops.ToPayload(shared.payload(value), state, shared.device) for value in outputs]
    source: Callable[[], tuple[object, ...]] = ops.FromBatch(shared.positionals, microbatch)
    if sources:
        source = sources[0] if len(sources) == 1 else FromPayloads(sources, state)
    sink: Callable[[object], None] = ToResults(shared.results, microbatch, state)
    if sinks:
        targets = [value.user for value in outputs]
        sink = sinks[0] if len(sinks) == 1 else ToPayloads(stage, targets, sinks, state)
    defers = (stage, microbatch) in shared.deferring
    operation = ops.Forward(action, shared.stages[stage], source, sink, defers=defers)
    if memory := shared.memories.get((stage, microbatch)):
        operation = HeldForward(operation, memory, shared.device)
    return [*shared.awaited(inputs), operation]


def backward(shared: Shared, action: Action) -> list[ops.Operation]:
    """B: takes the gradients of the output, makes those of the input, and adds those of the weights."""
    before, state, source, sink = _backward(shared, action)
    return [*before, ops.Backward(action, state, source, sink, shared.stages[action.stage].deferral)]


def backward_input(shared: Shared, action: Action) -> list[ops.Operation]:
    """I: like B, but leaves weight gradients for W in layers that can defer them."""
    before, state, source, sink = _backward(shared, action)
    return [*before, ops.BackwardInput(action, state, source, sink, shared.stages[action.stage].deferral)]


def backward_weight(shared: Shared, action: Action) -> list[ops.Operation]:
    """W: computes the weight gradients that I left."""
    return [ops.BackwardWeight(action, shared.state(action))]


def reduction(shared: Shared, action: Action) -> list[ops.Operation]:
    """R: sums the stage's weight gradients over the ranks that hold the stage."""
    return [ops.Reduce(action, shared.gradients.reduce)]


def optimizer_step(shared: Shared, action: Action) -> list[ops.Operation]:
    """S: steps the stage's weights."""
    return [ops.StepWeights(action, shared.step)]


def recomputation(shared: Shared, action: Action) -> list[ops.Operation]:
    """C: computes again what the forward saved."""
    return [Recompute(action, shared.memories[action.stage, action.microbatch])]


def offload(shared: Shared, action: Action) -> list[ops.Operation]:
    """O: copies what the forward saved to the host, and frees it."""
    return [shared.copy(action, shared.memories[action.stage, action.microbatch].saved.to_host)]


def load(shared: Shared, action: Action) -> list[ops.Operation]:
    """L: copies what the forward saved back to the device."""
    return [shared.copy(action, shared.memories[action.stage, action.microbatch].saved.to_device)]


def unshard(shared: Shared, action: Action) -> list[ops.Operation]:
    """U: gathers the weights of a stage under fully_shard."""
    return [Unshard(action, _fully_sharded(shared, action))]


def reshard(shared: Shared, action: Action) -> list[ops.Operation]:
    """H: frees the weights that the stage's unshard gathered."""
    return [Reshard(action, _fully_sharded(shared, action))]


def _fully_sharded(shared: Shared, action: Action) -> list[FSDPModule]:
    if modules := fully_sharded_in(shared.stages[action.stage].module):
        return modules
    raise UsageError(
        f"{action}: stage {action.stage} is not under fully_shard: apply it before the Pipeline is made, or run "
        "schedule.without_unshards()"
    )


def _backward(
    shared: Shared, action: Action
) -> tuple[list[ops.Operation], BackwardState, ops.GradientSource, ops.GradientSink | None]:
    """The waits that come first, the state that the forward kept, the source of gradients, and their sink."""
    inputs, outputs = shared.inputs(action), list(map(_gradient, shared.outputs(action)))
    source: ops.GradientSource = LossGradient(shared.results, action.microbatch)
    sources = [ops.PayloadGradients(shared.payloads[value]) for value in outputs]
    if sources:
        source = sources[0] if len(sources) == 1 else GradientsOfAll(sources)
        if fully_sharded_in(shared.stages[action.stage].module):  # which averages in a backward alone
            source = Filled(source)
    pairings = [Pairing(shared.payloads[value], shared.payload(_gradient(value))) for value in inputs]
    sink: ops.GradientSink | None = None
    if pairings:
        sink = pairings[0].gradient if len(pairings) == 1 else GradientShares(pairings)
    before = shared.awaited(outputs)
    if memory := shared.memories.get((action.stage, action.microbatch)):
        before.append(Leave(memory))
    return before, shared.state(action), source, sink


OPERATIONS: dict[Kind, Callable[[Shared, Action], list[ops.Operation]]] = {
    Kind.F: forward,
    Kind.B: backward,
    Kind.I: backward_input,
    Kind.W: backward_weight,
    Kind.R: reduction,
    Kind.S: optimizer_step,
    Kind.C: recomputation,
    Kind.O: offload,
    Kind.L: load,
    Kind.U: unshard,
    Kind.H: reshard,
}
"""For each kind, the function that makes its operations. The last operation runs the action; those before it wait."""
