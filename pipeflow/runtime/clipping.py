"""Clipping: passes the norm of a model's gradients to an optimizer that scales them itself."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef


class Clipping:
    """The result of `clip_grad_norm_` for an optimizer that scales the gradients of `parameters` in float32 in its
    step, such as MasterWeights; `clip_grad_norm_` then leaves those gradients unchanged.

    Attributes:
        parameters: the parameters whose gradients the optimizer scales.
        norm: norm of the gradients of the next step; None if it was not computed.
        factor: factor by which the optimizer must multiply the gradients, a scalar tensor on the same device as the
            norm; None for 1.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.parameters = frozenset(parameters)
        self.norm: Tensor | None = None
        self.factor: Tensor | None = None
        self._seen: list[tuple[TensorWeakRef, int]] = []  # the gradients that were clipped, with their versions

    def add(self, norm: Tensor, factor: Tensor) -> None:
        """Stores the norm, and clips by `factor` in addition to `pending`."""
        pending = self.pending
        self.norm, self.factor = norm, factor if pending is None else pending * factor
        self._seen = [(TensorWeakRef(gradient), gradient._version) for gradient in self._gradients()]

    @property
    def pending(self) -> Tensor | None:
        """The factor by which the current gradients must still be multiplied because they were clipped before."""
        if self.factor is None:
            return None
        now = self._gradients()
        same = len(now) == len(self._seen) and all(
            seen() is gradient and gradient._version == version
            for gradient, (seen, version) in zip(now, self._seen, strict=True)
        )
        return self.factor if same else None

    def _gradients(self) -> list[Tensor]:
        return [parameter.grad for parameter in self.parameters if parameter.grad is not None]

    def taken(self) -> tuple[Tensor | None, Tensor | None]:
        """Returns the norm and the factor for one step, and resets both."""
        norm, factor, self.norm, self.factor, self._seen = self.norm, self.factor, None, None, []
        return norm, factor


@torch.no_grad()
def scale_gradient(gradient: Tensor, factor: Tensor) -> None:
    """Multiplies `gradient` in place by a scalar tensor on its device, in float32 at least: in a 16-bit product, a GPU
    would round the factor to 16 bits first.
    """
    if gradient.is_sparse:
        gradient = gradient._values()  # mul_ gives a sparse tensor new values, which a detached one does not share
    if gradient.device.type == "cpu" or gradient.dtype not in (torch.bfloat16, torch.float16):
        gradient.mul_(factor)
    else:
        gradient.copy_(gradient.float() * factor)
