"""LayerNorm: whole on every rank. If the sequence is split, each rank computes a part of the parameters' gradients."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Self

import torch
from torch import nn

from pipeflow.core.errors import UsageError
from pipeflow.parallel.transport.group import Group
from pipeflow.tensor.division import adopt
from pipeflow.tensor.layer import TensorLayer


class LayerNorm(nn.LayerNorm, TensorLayer):
    """nn.LayerNorm, whole on every rank.

    Args:
        normalized_shape, eps, elementwise_affine, bias: as in nn.LayerNorm.
        sequence_parallel: the input is this rank's piece of the sequence. The gradients of the parameters are then
            parts of a sum over the ranks, as `partial_gradients` reports.
        dtype, device: of the parameters, as in torch.
        group: the tensor ranks; by default the tensor group of the context, or a group of one without a launch.
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        *,
        sequence_parallel: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        group: Group | None = None,
    ) -> None:
        shape = normalized_shape if isinstance(normalized_shape, int) else list(normalized_shape)
        super().__init__(shape, eps, elementwise_affine, bias, device, dtype)
        self.join(group)
        self.sequence_parallel = sequence_parallel

    @property
    def compiles(self) -> bool:
        """True, because it never waits for another rank."""
        return True

    def partial_gradients(self) -> Collection[str]:
        if not self.sequence_parallel or self.group.size == 1:
            return ()
        return [name for name, parameter in self._parameters.items() if parameter is not None]

    @classmethod
    def from_native_module(cls, module: nn.LayerNorm, group: Group | None = None, **options: Any) -> Self:
        """A copy of `module`, which is not changed. `options` are other arguments of this class."""
        if not isinstance(module, nn.LayerNorm):
            raise UsageError(f"{cls.__name__} is made from an nn.LayerNorm, got {type(module).__name__}")
        affine, bias = module.elementwise_affine, module.bias is not None
        layer = cls(module.normalized_shape, module.eps, affine, bias, device="meta", group=group, **options)
        adopt(layer, module._parameters, {}, layer.group)
        return layer.train(module.training)
