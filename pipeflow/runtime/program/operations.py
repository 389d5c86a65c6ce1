"""The computations of a compiled program. Each is called once a step; all it needs was given to it beforehand, so
that a step looks nothing up. What moves values between ranks is in `transfers` and `described`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.utils._pytree import tree_unflatten

from pipeflow.core.action import Action
from pipeflow.core.errors import UsageError
from pipeflow.deferral.module import Deferral
from pipeflow.parallel.transport.work import Work
from pipeflow.runtime.microbatch import snapshot
from pipeflow.runtime.program.cells import Cell, Results, Saved, flatten
from pipeflow.runtime.stage import Stage


class Operation(ABC):
    """One thing a rank does in a step."""

    __slots__ = ()

    @abstractmethod
    def __call__(self) -> None: ...


class Compute(Operation):
    """An operation that runs an action: what a timeline measures."""

    __slots__ = ("action",)

    def __init__(self, action: Action) -> None:
        self.action = action


class Forward(Compute):
    """F: from where the input is, through the module, to where the output goes."""

    __slots__ = ("microbatch", "sink", "source", "stage")

    def __init__(
        self,
        action: Action,
        stage: Stage,
        source: Callable[[], tuple[object, ...]],
        sink: Callable[[object], None],
    ) -> None:
        super().__init__(action)
        self.stage = stage
        self.microbatch = action.microbatch
        self.source = source
        self.sink = sink

    def __call__(self) -> None:
        stage = self.stage
        self.sink(stage.call(*self.source(), **stage.keywords[self.microbatch]))


class FromBatch:
    """The first stage's input."""

    __slots__ = ("microbatch", "positionals")

    def __init__(self, positionals: list[tuple[object, ...]], microbatch: int) -> None:
        self.positionals = positionals
        self.microbatch = microbatch

    def __call__(self) -> tuple[object, ...]:
        return self.positionals[self.microbatch]


class FromCell:
    """A later stage's input: the previous stage's output, as leaves of a graph of its own."""

    __slots__ = ("cell", "saved")

    def __init__(self, cell: Cell, saved: Saved | None) -> None:
        self.cell = cell
        self.saved = saved

    def __call__(self) -> tuple[object, ...]:
        cell = self.cell
        leaves, cell.tensors = cell.tensors, []
        if self.saved is not None:
            for leaf, wanted in zip(leaves, cell.grads, strict=True):
                if wanted:
                    leaf.requires_grad_()
            self.saved.leaves = leaves
        return (leaves[0] if cell.spec is None else tree_unflatten(leaves, cell.spec),)


class ToCell:
    """Where an inner stage's output goes. What stays here is its gradient edge, not the output itself. Memory that was
    written in place may be written again before the next stage reads it, as a static buffer is, so that is copied.
    """

    __slots__ = ("cell", "device", "saved")

    def __init__(self, cell: Cell, saved: Saved | None, device: torch.device) -> None:
        self.cell = cell
        self.saved = saved
        self.device = device

    def __call__(self, output: object) -> None:
        cell = self.cell
        tensors, cell.spec = flatten(output, self.device)
        cell.grads = tuple([tensor.requires_grad for tensor in tensors])
        cell.tensors = [
            (tensor.detach().clone() if tensor.is_inference() or tensor._version else tensor.detach())
            .contiguous()
            .resolve_conj()
            .resolve_neg()
            for tensor in tensors
        ]
        if self.saved is not None:
            self.saved.edges = [get_gradient_edge(tensor) for tensor in tensors if tensor.requires_grad]


class ToResults:
    """Where the last stage's output goes: into the loss."""

    __slots__ = ("microbatch", "results", "saved")

    def __init__(self, results: Results, microbatch: int, saved: Saved | None) -> None:
        self.results = results
        self.microbatch = microbatch
        self.saved = saved

    def __call__(self, output: object) -> None:
        results, microbatch = self.results, self.microbatch
        if results.criterion is not None:
            loss = results.criterion(output, results.labels[microbatch])
            if not isinstance(loss, Tensor) or loss.dim():
                what = f"of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
                raise UsageError(f"criterion must return a scalar tensor, got {what}: take the mean over its samples")
            results.losses[microbatch] = loss.detach()
            if self.saved is not None and loss.requires_grad:
                self.saved.edges = [get_gradient_edge(loss)]
        if results.keep_outputs:
            results.outputs[microbatch] = snapshot(output)


class Backward(Compute):
    """B: from the output's gradients, through the graph, to the parameters' and the input's."""

    __slots__ = ("saved", "sink", "source")

    def __init__(self, action: Action, saved: Saved, source: Callable[[], list[Tensor]], sink: Cell | None) -> None:
        super().__init__(action)
        self.saved = saved
        self.source = source
        self.sink = sink

    def __call__(self) -> None:
        saved = self.saved
        gradients = self.source()
        if saved.edges:
            torch.autograd.backward(saved.edges, gradients)
            saved.edges = []
        if self.sink is not None:
            self.sink.tensors = [_gradient_of(leaf) for leaf in saved.leaves if leaf.requires_grad]
        saved.leaves = []


class BackwardInput(Backward):
    """I: as B, but the products that make weight gradients are kept for later, where the layers can do so."""

    __slots__ = ("deferral",)

    def __init__(
        self, action: Action, saved: Saved, source: Callable[[], list[Tensor]], sink: Cell | None, deferral: Deferral
    ) -> None:
        super().__init__(action, saved, source, sink)
        self.deferral = deferral

    def __call__(self) -> None:
        deferral = self.deferral
        deferral.queue = self.saved.deferred
        try:
            super().__call__()
        finally:
            deferral.queue = None


class BackwardWeight(Compute):
    """W: the products that I kept, in its order."""

    __slots__ = ("saved",)

    def __init__(self, action: Action, saved: Saved) -> None:
        super().__init__(action)
        self.saved = saved

    def __call__(self) -> None:
        for product in self.saved.deferred:
            product()
        self.saved.deferred = []


class Beside(Operation):
    """An action that is only begun where it stands, and goes on beside what follows until its works are done."""

    __slots__ = ("action", "works")

    def __init__(self, action: Action) -> None:
        self.action = action
        self.works: list[Work] = []

    def __call__(self) -> None:
        self.works = self.begin()

    @abstractmethod
    def begin(self) -> list[Work]:
        """Begins it; what is under way then."""

    def end(self) -> None:
        """Returns when it is done."""
        for work in self.works:
            work.wait()
        self.works = []


class Await(Compute):
    """The wait for what was begun beside the computations."""

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
        """It ends with the step, when all gradients are put in their places."""
        self.works = []


def _gradient_of(leaf: Tensor) -> Tensor:
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad.contiguous().resolve_conj().resolve_neg()


class LossGradient:
    """The gradient that a backward starts from: the microbatch's part of the batch's mean loss."""

    __slots__ = ("microbatch", "results")

    def __init__(self, results: Results, microbatch: int) -> None:
        self.results = results
        self.microbatch = microbatch

    def __call__(self) -> list[Tensor]:
        results = self.results
        loss = results.losses[self.microbatch]
        assert loss is not None
        return [torch.full_like(loss, results.weights[self.microbatch] * results.gradient_scale)]


class CellGradients:
    """The gradients that the next stage made."""

    __slots__ = ("cell",)

    def __init__(self, cell: Cell) -> None:
        self.cell = cell

    def __call__(self) -> list[Tensor]:
        gradients, self.cell.tensors = self.cell.tensors, []
        return gradients
