"""Inputs and outputs of a stage where routes begin or end: several payloads instead of one. Must not contain: which
payloads, and their transfers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from pipeflow.core.errors import UsageError
from pipeflow.engine.runtime.program.operations import FromPayload, PayloadGradients, ToPayload
from pipeflow.engine.runtime.program.payload import BackwardState, Payload


class FromPayloads:
    """The inputs of a stage, one argument each: the value of the previous stage, then the value of each route."""

    __slots__ = ("sources", "state")

    def __init__(self, sources: Sequence[FromPayload], state: BackwardState | None) -> None:
        self.sources = sources
        self.state = state

    def __call__(self) -> tuple[object, ...]:
        arguments: list[object] = []
        leaves: list[Tensor] = []
        for source in self.sources:
            arguments += source()
            if self.state is not None:
                leaves += self.state.leaves
        if self.state is not None:
            self.state.leaves = leaves
        return tuple(arguments)


class ToPayloads:
    """The sink for a stage's outputs: a tuple of the value for the next stage and the value for each route."""

    __slots__ = ("sinks", "stage", "state", "targets")

    def __init__(
        self, stage: int, targets: Sequence[int], sinks: Sequence[ToPayload], state: BackwardState | None
    ) -> None:
        self.stage = stage
        self.targets = targets
        self.sinks = sinks
        self.state = state

    def __call__(self, output: object) -> None:
        if not isinstance(output, tuple | list) or len(output) != len(self.targets):
            has = f"{len(output)} entries" if isinstance(output, tuple | list) else f"a {type(output).__name__}"
            raise UsageError(
                f"stage {self.stage} sends its output to stages {', '.join(map(str, self.targets))}, so it must return "
                f"a tuple with an entry for each of them, in this order; it returned {has}"
            )
        edges = []
        for sink, part in zip(self.sinks, output, strict=True):
            sink(part)
            if self.state is not None:
                edges += self.state.edges
        if self.state is not None:
            self.state.edges = edges


class GradientsOfAll:
    """The gradients of all outputs, one after the other."""

    __slots__ = ("sources",)

    def __init__(self, sources: Sequence[PayloadGradients]) -> None:
        self.sources = sources

    def __call__(self) -> list[Tensor]:
        return [gradient for source in self.sources for gradient in source()]


class Pairing(NamedTuple):
    """An input of a stage, and its gradient."""

    activation: Payload
    gradient: Payload


class GradientShares:
    """The sink for the gradients of all inputs: each input's gradients go into a payload of their own."""

    __slots__ = ("pairings",)

    def __init__(self, pairings: Sequence[Pairing]) -> None:
        self.pairings = pairings

    @property
    def tensors(self) -> list[Tensor]:
        """The gradients of the value, one for each destination."""
        return [gradient for pairing in self.pairings for gradient in pairing.gradient.tensors]

    @tensors.setter
    def tensors(self, gradients: list[Tensor]) -> None:
        rest = iter(gradients)
        for activation, gradient in self.pairings:
            gradient.tensors = [next(rest) for wanted in activation.grads if wanted]
