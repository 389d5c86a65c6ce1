"""Buckets: the gradients of neighbouring parameters in one tensor, so that they are sent together. Must not contain:
which ranks sum which gradients.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from itertools import groupby

import torch
from torch import Tensor, nn

from pipeflow.core.errors import UsageError
from pipeflow.parallel.sharding import like, local_part, settled

BUCKET = 2**22  # bytes of gradients that are exchanged at once


class Bucket:
    """Parameters of one dtype and device whose gradients are packed into one row and unpacked from it. After the
    gradients, the row says which parameters have one, so that no gradient and a zero gradient are not confused.
    """

    __slots__ = ("_presence", "device", "dtype", "parameters", "sizes")

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.parameters = list(parameters)
        self.dtype = gradient_dtype(self.parameters[0])
        self.device = self.parameters[0].device
        self.sizes = [local_part(parameter).numel() for parameter in self.parameters]
        self._presence: tuple[list[float], Tensor] | None = None  # of the last row, and its tensor

    @torch.no_grad()
    def pack(self) -> Tensor:
        """This rank's current gradients as one real-valued row, with zeros where there is none. Raises UsageError for a
        gradient that is neither dense nor has sparse rows.
        """
        rows = [self._row(parameter, size) for parameter, size in zip(self.parameters, self.sizes, strict=True)]
        row = torch.cat([*rows, self._presence_row()])
        return torch.view_as_real(row).flatten() if row.is_complex() else row

    def empty(self) -> Tensor:
        """Memory for a row of another rank."""
        numbers = (sum(self.sizes) + len(self.sizes)) * (2 if self.dtype.is_complex else 1)
        return torch.empty(numbers, dtype=self.dtype.to_real(), device=self.device)

    def leave_out(self, parameters: Container[nn.Parameter]) -> None:
        """Puts parameters without a gradient into the places of `parameters`."""
        for index, size in enumerate(self.sizes):
            if self.parameters[index] in parameters:
                stand_in = torch.empty(size, dtype=self.dtype, device=self.device)
                self.parameters[index] = nn.Parameter(stand_in, requires_grad=False)

    @torch.no_grad()
    def unpack(self, row: Tensor) -> None:
        """Writes the gradients from a row that was summed over ranks. A parameter for which no rank has a gradient
        keeps None.
        """
        row = torch.view_as_complex(row.view(-1, 2)) if self.dtype.is_complex else row
        *parts, there = row.split([*self.sizes, len(self.sizes)])
        missing = any(parameter.grad is None for parameter in self.parameters)
        somewhere = (
            (there.real if there.is_complex() else there).tolist() if missing else self.sizes
        )  # reads from the device only if needed
        for parameter, part, has_one in zip(self.parameters, parts, somewhere, strict=True):
            if parameter.grad is not None:
                _replace(parameter.grad, part)
            elif has_one:
                gradient = part.view(local_part(parameter).shape).clone()
                parameter.grad = gradient.to_sparse(1) if has_one < 0 else like(gradient, parameter)

    def _presence_row(self) -> Tensor:
        """Which parameters have a gradient. Kept from step to step, since the host waits for each copy to a device."""
        there = [_presence(parameter.grad) for parameter in self.parameters]
        if self._presence is None or self._presence[0] != there:
            self._presence = there, torch.tensor(there, dtype=self.dtype, device=self.device)
        return self._presence[1]

    def _row(self, parameter: nn.Parameter, size: int) -> Tensor:
        if parameter.grad is None:
            return torch.zeros(size, dtype=self.dtype, device=self.device)
        parameter.grad = settled(parameter.grad, parameter)
        gradient = local_part(parameter.grad)
        if gradient.is_sparse:
            gradient = gradient.to_dense()
        if gradient.layout is not torch.strided:
            raise UsageError(
                f"the gradient of a parameter of shape {tuple(parameter.shape)} is laid out as {gradient.layout}, "
                "which cannot be summed over ranks: make it dense, or sparse as nn.Embedding does"
            )
        return gradient.flatten().to(self.dtype)


def _presence(gradient: Tensor | None) -> float:
    """The entry of a parameter in a row: 0 without a gradient, -1 for a sparse one, else 1."""
    if gradient is None:
        return 0.0
    return -1.0 if gradient.is_sparse else 1.0


def in_buckets(parameters: Iterable[nn.Parameter], size: int = BUCKET) -> Iterator[list[nn.Parameter]]:
    """Groups neighbouring parameters whose gradients have one dtype and device, up to `size` bytes per group."""
    for _, alike in groupby(parameters, key=lambda parameter: (gradient_dtype(parameter), parameter.device)):
        bucket: list[nn.Parameter] = []
        filled = 0
        for parameter in alike:
            filled += parameter.nbytes
            if bucket and filled > size:
                yield bucket
                bucket, filled = [], parameter.nbytes
            bucket.append(parameter)
        yield bucket


def gradient_dtype(parameter: nn.Parameter) -> torch.dtype:
    """The dtype of the parameter's gradient, which may be wider than its own."""
    return parameter.grad_dtype or parameter.dtype


def widen_gradient(parameter: nn.Parameter, dtype: torch.dtype) -> None:
    """Makes the parameter's gradient accumulate in `dtype` if the parameter's dtype is narrower."""
    if parameter.is_floating_point() and torch.promote_types(parameter.dtype, dtype) is not gradient_dtype(parameter):
        gradient, parameter.grad = parameter.grad, None
        parameter.grad_dtype = torch.promote_types(parameter.dtype, dtype)
        parameter.grad = None if gradient is None else gradient.to(parameter.grad_dtype)


def _replace(gradient: Tensor, by: Tensor) -> None:
    """Writes other values into a gradient, which keeps its layout, sparsity and distribution."""
    if gradient.is_sparse:
        gradient.copy_(by.view(gradient.shape).to_sparse(gradient.sparse_dim()))
    else:
        local = local_part(gradient)
        local.copy_(by.view(local.shape))
