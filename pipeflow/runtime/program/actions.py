"""Actions: the operations that an action of each kind becomes, in one table. What moves values between ranks is the
business of `compile`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pipeflow.core.action import Action, Kind
from pipeflow.core.dataflow import Content, Value
from pipeflow.runtime.gradients.step_end import Gradients
from pipeflow.runtime.program import operations as ops
from pipeflow.runtime.program.payload import BackwardState, Payload
from pipeflow.runtime.program.results import Results
from pipeflow.runtime.stage import Stage


@dataclass(slots=True)
class Shared:
    """What the operations of one rank's program share, found by value while they are made."""

    stages: Mapping[int, Stage]
    num_stages: int
    device: torch.device
    training: bool
    gradients: Gradients
    results: Results
    positionals: list[tuple[object, ...]]  # per microbatch, what the first stage gets
    payloads: dict[Value, Payload] = field(default_factory=dict)
    states: dict[tuple[int, int], BackwardState] = field(default_factory=dict)
    waits: dict[Value, ops.Operation] = field(default_factory=dict)

    def payload(self, value: Value) -> Payload:
        """The payload of a value that is made on this rank."""
        return self.payloads.setdefault(value, Payload())

    def awaited(self, value: Value) -> list[ops.Operation]:
        """The wait for a value from another rank; nothing for one that was made here."""
        return [self.waits[value]] if value in self.waits else []


def forward(shared: Shared, action: Action) -> list[ops.Operation]:
    """F: the batch or a payload goes in; a payload or the loss comes out."""
    stage, microbatch = action.stage, action.microbatch
    state = shared.states.setdefault((stage, microbatch), BackwardState()) if shared.training else None
    before: list[ops.Operation] = []
    source: Callable[[], tuple[object, ...]] = ops.FromBatch(shared.positionals, microbatch)
    if stage > 0:
        value = Value(Content.ACTIVATION, stage - 1, microbatch)
        before = shared.awaited(value)
        source = ops.FromPayload(shared.payloads[value], state)
    sink: Callable[[object], None] = ops.ToResults(shared.results, microbatch, state)
    if stage < shared.num_stages - 1:
        sink = ops.ToPayload(shared.payload(Value(Content.ACTIVATION, stage, microbatch)), state, shared.device)
    return [*before, ops.Forward(action, shared.stages[stage], source, sink)]


def backward(shared: Shared, action: Action) -> list[ops.Operation]:
    """B: the gradient of the output goes in, that of the input comes out; those of the weights are added."""
    before, state, source, sink = _backward(shared, action)
    return [*before, ops.Backward(action, state, source, sink)]


def backward_input(shared: Shared, action: Action) -> list[ops.Operation]:
    """I: as B, with weight gradients left for W where layers can do so."""
    before, state, source, sink = _backward(shared, action)
    return [*before, ops.BackwardInput(action, state, source, sink, shared.stages[action.stage].deferral)]


def backward_weight(shared: Shared, action: Action) -> list[ops.Operation]:
    """W: the weight gradients that I left."""
    return [ops.BackwardWeight(action, shared.states[action.stage, action.microbatch])]


def reduction(shared: Shared, action: Action) -> list[ops.Operation]:
    """R: the sum of the stage's weight gradients over the ranks that hold it."""
    return [ops.Reduce(action, shared.gradients.reduce)]


def _backward(
    shared: Shared, action: Action
) -> tuple[list[ops.Operation], BackwardState, Callable[[], list[Tensor]], Payload | None]:
    """What is awaited first, what the forward kept, where the gradients come from and where they go."""
    stage, microbatch = action.stage, action.microbatch
    before: list[ops.Operation] = []
    source: ops.GradientSource = ops.LossGradient(shared.results, microbatch)
    if stage < shared.num_stages - 1:
        value = Value(Content.GRADIENT, stage + 1, microbatch)
        before = shared.awaited(value)
        source = ops.PayloadGradients(shared.payloads[value])
    sink = shared.payload(Value(Content.GRADIENT, stage, microbatch)) if stage > 0 else None
    return before, shared.states[stage, microbatch], source, sink


OPERATIONS: dict[Kind, Callable[[Shared, Action], list[ops.Operation]]] = {
    Kind.F: forward,
    Kind.B: backward,
    Kind.I: backward_input,
    Kind.W: backward_weight,
    Kind.R: reduction,
}
"""Of each kind, what makes its operations; the last one of them runs the action, the others wait for what it needs."""
