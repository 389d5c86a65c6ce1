"""Clipping: what the norm of a model's gradients says to an optimizer that scales them itself."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef


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
        self._seen: list[tuple[TensorWeakRef, int]] = []  # the gradients that were clipped, with their versions

    def add(self, norm: Tensor, factor: float) -> None:
        """Clips by `factor`, on top of what `pending` says."""
        self.norm, self.factor = norm, self.pending * factor
        self._seen = [(TensorWeakRef(gradient), gradient._version) for gradient in self._gradients()]

    @property
    def pending(self) -> float:
        """What the gradients that are there now are to be multiplied by, since they were clipped already."""
        if self.factor == 1:
            return 1.0
        now = self._gradients()
        same = len(now) == len(self._seen) and all(
            seen() is gradient and gradient._version == version
            for gradient, (seen, version) in zip(now, self._seen, strict=True)
        )
        return self.factor if same else 1.0

    def _gradients(self) -> list[Tensor]:
        return [parameter.grad for parameter in self.parameters if parameter.grad is not None]

    def taken(self) -> tuple[Tensor | None, float]:
        """The norm and the factor, for one step."""
        norm, factor, self.norm, self.factor, self._seen = self.norm, self.factor, None, 1.0, []
        return norm, factor
