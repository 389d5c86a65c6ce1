"""The computations of a compiled program. Each operation is called once per step and is given all it needs when it is
made, so that a step looks nothing up. Must not contain: transfers between ranks, which are in `transfers` and
`dynamic_shapes`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from pipeflow.core.action import Action
from pipeflow.engine.deferral.module import Deferral
from pipeflow.engine.parallel.transport.protocol import Work
from pipeflow.engine.runtime.program.payload import BackwardState, Payload, flatten
from pipeflow.engine.runtime.program.unused import Unused
from pipeflow.engine.runtime.snapshots import may_be_overwritten
from pipeflow.engine.runtime.stage import Stage
from pipeflow.engine.torch_private.trees import tree_unflatten

GradientSource = Callable[[], list[Tensor]]
"""Returns the gradients of a stage's output, with which a backward starts. Some may be `Unused`."""


class GradientSink(Protocol):
    """Takes the gradients of those inputs of a stage that require one."""

    tensors: list[Tensor]


class Operation(ABC):
    """A single operation of a rank in a step."""

    __slots__ = ()

    @abstractmethod
    def __call__(self) -> None: ...


class ComputeOperation(Operation):
    """An operation that runs an action; a timeline measures it."""

    __slots__ = ("action",)

    def __init__(self, action: Action) -> None:
        self.action = action


class Forward(ComputeOperation):
    """F: takes the input from `source`, calls the module, and passes the output to `sink`. If it `defers`, layers leave
    weight gradients for W.
    """

    __slots__ = ("defers", "microbatch", "sink", "source", "stage")

    def __init__(
        self,
        action: Action,
        stage: Stage,
        source: Callable[[], tuple[object, ...]],
        sink: Callable[[object], None],
        *,
        defers: bool,
    ) -> None:
        super().__init__(action)
        self.stage = stage
        self.defers = defers
        self.microbatch = action.microbatch
        self.source = source
        self.sink = sink

    def __call__(self) -> None:
        stage = self.stage
        stage.deferral.active = self.defers
        self.sink(stage.call(*self.source(), **stage.keywords[self.microbatch]))


class FromBatch:
    """The input of the first stage, taken from the batch."""

    __slots__ = ("microbatch", "positionals")

    def __init__(self, positionals: list[tuple[object, ...]], microbatch: int) -> None:
        self.positionals = positionals
        self.microbatch = microbatch

    def __call__(self) -> tuple[object, ...]:
        return self.positionals[self.microbatch]


class FromPayload:
    """A later stage's input: the previous stage's output, as leaves of a new graph."""

    __slots__ = ("payload", "state")

    def __init__(self, payload: Payload, state: BackwardState | None) -> None:
        self.payload = payload
        self.state = state

    def __call__(self) -> tuple[object, ...]:
        payload = self.payload
        leaves, payload.tensors = payload.tensors, []
        if self.state is not None:
            for leaf, wanted in zip(leaves, payload.grads, strict=True):
                if wanted:
                    leaf.requires_grad_()
            self.state.leaves = leaves
        return (leaves[0] if payload.spec is None else tree_unflatten(leaves, payload.spec),)


class ToPayload:
    """The sink for an inner stage's output. Keeps its gradient edges, not the output itself. Memory that may be
    overwritten before the next stage reads it, such as a static buffer, is copied.
    """

    __slots__ = ("device", "payload", "state")

    def __init__(self, payload: Payload, state: BackwardState | None, device: torch.device) -> None:
        self.payload = payload
        self.state = state
        self.device = device

    def __call__(self, output: object) -> None:
        payload = self.payload
        tensors, payload.spec = flatten(output, self.device)
        payload.grads = tuple([tensor.requires_grad for tensor in tensors])
        payload.tensors = [
            (
                tensor.detach().clone()
                if (may_be_overwritten(tensor) if tensor.grad_fn is None else tensor._version)  # saves a call
                else tensor.detach()
            )
            .contiguous()
            .resolve_conj()
            .resolve_neg()
            for tensor in tensors
        ]
        if self.state is not None:
            self.state.edges = [get_gradient_edge(tensor) for tensor in tensors if tensor.requires_grad]


class Backward(ComputeOperation):
    """B: computes gradients of parameters and input from the output's. Layers called again defer as in the forward."""

    __slots__ = ("deferral", "sink", "source", "state")

    defers = False

    def __init__(
        self,
        action: Action,
        state: BackwardState,
        source: GradientSource,
        sink: GradientSink | None,
        deferral: Deferral,
    ) -> None:
        super().__init__(action)
        self.state = state
        self.source = source
        self.sink = sink
        self.deferral = deferral

    def __call__(self) -> None:
        state = self.state
        gradients = self.source()
        self.deferral.active = self.defers
        if state.edges:
            state.backward(gradients)
        if self.sink is not None:
            self.sink.tensors = [_gradient_of(leaf) for leaf in state.leaves if leaf.requires_grad]
        state.leaves = []


class BackwardInput(Backward):
    """I: like B, but layers that can do so keep the products that make weight gradients for W."""

    __slots__ = ()

    defers = True

    def __call__(self) -> None:
        deferral = self.deferral
        deferral.queue = self.state.deferred
        try:
            super().__call__()
        finally:
            deferral.queue = None


class BackwardWeight(ComputeOperation):
    """W: runs the products that I kept, in the same order."""

    __slots__ = ("state",)

    def __init__(self, action: Action, state: BackwardState) -> None:
        super().__init__(action)
        self.state = state

    def __call__(self) -> None:
        for product in self.state.deferred:
            product()
        self.state.deferred = []


class Beside(Operation):
    """An action that is started in its place and then runs beside the following operations until its works are done.
    `after` has the actions on other streams whose values it needs.
    """

    __slots__ = ("action", "after", "works")

    def __init__(self, action: Action) -> None:
        self.action = action
        self.after: list[Beside] = []
        self.works: list[Work] = []

    def __call__(self) -> None:
        self.works = self.begin()

    @abstractmethod
    def begin(self) -> list[Work]:
        """Starts the action and returns the works under way."""

    def end(self) -> None:
        """Waits until the action is done."""
        for work in self.works:
            work.wait()
        self.works = []


class Await(ComputeOperation):
    """The wait for an action that runs beside the computations."""

    __slots__ = ("beside",)

    def __init__(self, beside: Beside) -> None:
        super().__init__(beside.action)
        self.beside = beside

    def __call__(self) -> None:
        self.beside.end()


class Reduce(Beside):
    """R: the reduction of a stage's weight gradients."""

    __slots__ = ("reduce",)

    def __init__(self, action: Action, reduce: Callable[[int], list[Work]]) -> None:
        super().__init__(action)
        self.reduce = reduce

    def begin(self) -> list[Work]:
        return self.reduce(self.action.stage)

    def end(self) -> None:
        """Does nothing: the reduction ends with the step, when all gradients are written back."""
        self.works = []


class StepWeights(ComputeOperation):
    """S: the optimizer's step of a stage."""

    __slots__ = ("step",)

    def __init__(self, action: Action, step: Callable[[int], None]) -> None:
        super().__init__(action)
        self.step = step

    def __call__(self) -> None:
        self.step(self.action.stage)


def _gradient_of(leaf: Tensor) -> Tensor:
    return Unused.of(leaf) if leaf.grad is None else leaf.grad.contiguous().resolve_conj().resolve_neg()


class PayloadGradients:
    """The gradients that the next stage computed."""

    __slots__ = ("payload",)

    def __init__(self, payload: Payload) -> None:
        self.payload = payload

    def __call__(self) -> list[Tensor]:
        gradients, self.payload.tensors = self.payload.tensors, []
        return gradients
