"""Actions: a table of the operations that each kind of action becomes. Must not contain: transfers between ranks, which
are in `compile`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch

from pipeflow.core.action import Action, Kind
from pipeflow.core.dataflow import Content, Value
from pipeflow.core.route import Routes, sources_of, targets_of
from pipeflow.runtime.gradients.step_end import Gradients
from pipeflow.runtime.program import operations as ops
from pipeflow.runtime.program.payload import BackwardState, Payload
from pipeflow.runtime.program.results import Results
from pipeflow.runtime.program.route_values import FromPayloads, GradientsOfAll, Pairing, Shares, ToPayloads
from pipeflow.runtime.stage import Stage


@dataclass(slots=True)
class Shared:
    """The objects that operations of one rank's program share, looked up by value while the operations are made."""

    stages: Mapping[int, Stage]
    num_stages: int
    device: torch.device
    training: bool
    gradients: Gradients
    results: Results
    positionals: list[tuple[object, ...]]  # arguments of the first stage, by microbatch
    routes: Routes = ()
    deferring: frozenset[int] = frozenset()  # the stages of which a backward is I and W
    payloads: dict[Value, Payload] = field(default_factory=dict)
    states: dict[tuple[int, int], BackwardState] = field(default_factory=dict)
    waits: dict[Value, ops.Operation] = field(default_factory=dict)

    def payload(self, value: Value) -> Payload:
        """The payload of a value that is made on this rank."""
        return self.payloads.setdefault(value, Payload())

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
    state = shared.states.setdefault((stage, microbatch), BackwardState()) if shared.training else None
    inputs, outputs = shared.inputs(action), shared.outputs(action)
    sources = [ops.FromPayload(shared.payloads[value], state) for value in inputs]
    sinks = [ops.ToPayload(shared.payload(value), state, shared.device) for value in outputs]
    source: Callable[[], tuple[object, ...]] = ops.FromBatch(shared.positionals, microbatch)
    if sources:
        source = sources[0] if len(sources) == 1 else FromPayloads(sources, state)
    sink: Callable[[object], None] = ops.ToResults(shared.results, microbatch, state)
    if sinks:
        targets = [value.user for value in outputs]
        sink = sinks[0] if len(sinks) == 1 else ToPayloads(stage, targets, sinks, state)
    defers = stage in shared.deferring
    return [*shared.awaited(inputs), ops.Forward(action, shared.stages[stage], source, sink, defers=defers)]


def backward(shared: Shared, action: Action) -> list[ops.Operation]:
    """B: takes the gradients of the output, makes those of the input, and adds those of the weights."""
    before, state, source, sink = _backward(shared, action)
    return [*before, ops.Backward(action, state, source, sink)]


def backward_input(shared: Shared, action: Action) -> list[ops.Operation]:
    """I: like B, but leaves weight gradients for W in layers that can defer them."""
    before, state, source, sink = _backward(shared, action)
    return [*before, ops.BackwardInput(action, state, source, sink, shared.stages[action.stage].deferral)]


def backward_weight(shared: Shared, action: Action) -> list[ops.Operation]:
    """W: computes the weight gradients that I left."""
    return [ops.BackwardWeight(action, shared.states[action.stage, action.microbatch])]


def reduction(shared: Shared, action: Action) -> list[ops.Operation]:
    """R: sums the stage's weight gradients over the ranks that hold the stage."""
    return [ops.Reduce(action, shared.gradients.reduce)]


def _backward(
    shared: Shared, action: Action
) -> tuple[list[ops.Operation], BackwardState, ops.GradientSource, ops.GradientSink | None]:
    """The waits that come first, the state that the forward kept, the source of gradients, and their sink."""
    inputs, outputs = shared.inputs(action), list(map(_gradient, shared.outputs(action)))
    source: ops.GradientSource = ops.LossGradient(shared.results, action.microbatch)
    sources = [ops.PayloadGradients(shared.payloads[value]) for value in outputs]
    if sources:
        source = sources[0] if len(sources) == 1 else GradientsOfAll(sources)
    pairings = [Pairing(shared.payloads[value], shared.payload(_gradient(value))) for value in inputs]
    sink: ops.GradientSink | None = None
    if pairings:
        sink = pairings[0].gradient if len(pairings) == 1 else Shares(pairings)
    return shared.awaited(outputs), shared.states[action.stage, action.microbatch], source, sink


OPERATIONS: dict[Kind, Callable[[Shared, Action], list[ops.Operation]]] = {
    Kind.F: forward,
    Kind.B: backward,
    Kind.I: backward_input,
    Kind.W: backward_weight,
    Kind.R: reduction,
}
"""For each kind, the function that makes its operations. The last operation runs the action; those before it wait."""
