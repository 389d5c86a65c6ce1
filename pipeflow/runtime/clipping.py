"""Clipping: what the norm of a model's gradients says to an optimizer that scales them itself."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn


class Clipping:
    """Left by `clip_grad_norm_` for an optimizer that scales the gradients of `parameters` in float32, in its step,
    such as MasterWeights: clipping leaves those gradients as they are.

    Attributes:
        norm: of the gradients of the coming step; None when nobody asked.
        factor: what they are to be multiplied by.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.parameters = frozenset(parameters)
        self.norm: Tensor | None = None
        self.factor = 1.0

    def taken(self) -> tuple[Tensor | None, float]:
        """The norm and the factor, for one step."""
        norm, factor, self.norm, self.factor = self.norm, self.factor, None, 1.0
        return norm, factor
