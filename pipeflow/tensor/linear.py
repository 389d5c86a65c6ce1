"""Linear layers that are split by columns or by rows, and the base class that they share with the classifiers. Must not
contain: their products and collectives, which are in matmul.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Self

import torch
from torch import Tensor, nn

from pipeflow.core.errors import UsageError
from pipeflow.parallel.sharding import Split
from pipeflow.parallel.transport.group import Group
from pipeflow.tensor.division import adopt, divide
from pipeflow.tensor.initialize import Draw, draw_part_
from pipeflow.tensor.layer import DeferringTensorLayer
from pipeflow.tensor.matmul import Mode, column_linear, row_linear
from pipeflow.tensor.regions import gather_from_tensor_region, scatter_to_tensor_region


class SplitLinear(DeferringTensorLayer):
    """Abstract base class of linear layers of which each rank has a part, with the initial values of nn.Linear.

    Attributes:
        in_features, out_features: sizes of the whole layer.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def _make(
        self,
        sizes: tuple[int, int],
        weight: nn.Parameter | tuple[int, int],
        bias: int | None,
        dtype: torch.dtype | None,
        device: torch.device | str | None,
    ) -> None:
        """Makes the parameters, from the whole layer's (in, out), this rank's weight or its shape, and the size of the
        bias.
        """
        self.in_features, self.out_features = sizes
        self._owns_weight = not isinstance(weight, nn.Parameter)
        if not isinstance(weight, nn.Parameter):
            weight = nn.Parameter(torch.empty(weight, dtype=dtype, device=device))
        self.weight = weight
        empty = None if bias is None else nn.Parameter(torch.empty(bias, dtype=dtype, device=device))
        self.register_parameter("bias", empty)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the full weight and bias from torch's default generator, like nn.Linear, and keeps this rank's part.

        Ranks with the same seed hold parts of one layer. A weight that was passed in is not changed.
        """
        splits, rank = self.splits(), self.group.rank
        if self._owns_weight:
            # The same computation, with the same rounding, as kaiming_uniform_ with a=sqrt(5).
            std = nn.init.calculate_gain("leaky_relu", math.sqrt(5)) / math.sqrt(self.in_features)
            draw_part_(self.weight, _uniform(math.sqrt(3.0) * std), split=splits.get("weight"), rank=rank)
        if self.bias is not None:
            draw_part_(self.bias, _uniform(1 / math.sqrt(self.in_features)), split=splits.get("bias"), rank=rank)

    @classmethod
    def from_native_module(cls, module: nn.Linear, group: Group | None = None, **options: Any) -> Self:
        """This rank's part of `module`, which is not changed, with its dtype, device, mode and requires_grad.

        `options` are other arguments of this class. Raises UsageError like the class.
        """
        if not isinstance(module, nn.Linear):
            raise UsageError(f"{cls.__name__} is made from an nn.Linear, got {type(module).__name__}")
        bias, dtype = module.bias is not None, module.weight.dtype
        layer = cls(module.in_features, module.out_features, bias, dtype=dtype, device="meta", group=group, **options)
        adopt(layer, module._parameters if layer._owns_weight else {"bias": module.bias}, layer.splits(), layer.group)
        return layer.train(module.training)

    def _require_width(self, input: Tensor, hint: str) -> None:
        if input.shape[-1] != self.weight.shape[1]:
            raise UsageError(
                f"{self._get_name()} on tensor rank {self.group.rank} takes {self.weight.shape[1]} features, got a "
                f"shape of {tuple(input.shape)}{hint}"
            )

    def extra_repr(self) -> str:
        part = f", {self.group.rank} of {self.group.size}" if self.group.size > 1 else ""
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}{part}"


class ColumnParallelLinear(SplitLinear):
    """A linear layer of which each rank computes a part of the output features.

    The input is (..., in_features), the same on every rank; the output is (..., out_features / T), where T is the
    number of tensor ranks. The gradient of the input is summed over the ranks while the weight's gradient is computed.

    Args:
        in_features, out_features, bias: as in nn.Linear, for the whole layer.
        gather_output: return all out_features on every rank.
        sequence_parallel: the input is this rank's piece (batch, sequence / T, in_features) of the sequence; the output
            has the whole sequence. Each rank keeps the gathered input for the backward, batch x sequence x in_features
            elements. That is T times the memory of keeping its piece, but saves a collective per backward.
        dtype, device: of the parameters, as in torch.
        group: the tensor ranks; by default the tensor group of the context, or a group of one without a launch.

    Raises UsageError if the number of tensor ranks does not divide out_features.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        gather_output: bool = False,
        sequence_parallel: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        group: Group | None = None,
    ) -> None:
        super().__init__()
        rows = divide(self._get_name(), "out_features", out_features, self.join(group).size)
        self.gather_output, self.sequence_parallel = gather_output, sequence_parallel
        self._make((in_features, out_features), (rows, in_features), rows if bias else None, dtype, device)

    def forward(self, input: Tensor) -> Tensor:
        self._require_width(input, "")
        mode = Mode(self.group, self.sequence_parallel, self._deferred_weights(), self.copies)
        output = column_linear(input, self.weight, self.bias, mode)
        return gather_from_tensor_region(output, self.group) if self.gather_output else output

    def splits(self) -> Mapping[str, Split]:
        return column_splits(self)


class RowParallelLinear(SplitLinear):
    """A linear layer of which each rank computes a part of the sum over the input features.

    The input is (..., in_features / T), as a column-parallel layer returns it, where T is the number of tensor ranks;
    the output is (..., out_features), the same on every rank. The bias is whole on every rank and is added after the
    sum; its gradient is whole, too, even if the sequence is split.

    Args:
        in_features, out_features, bias: as in nn.Linear, for the whole layer.
        input_is_parallel: True if the input is this rank's part; False if it is whole and the same on every rank.
        sequence_parallel: return this rank's piece (batch, sequence / T, out_features) of the sequence.
        dtype, device: of the parameters, as in torch.
        group: the tensor ranks; by default the tensor group of the context, or a group of one without a launch.

    Raises UsageError if the number of tensor ranks does not divide in_features.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        input_is_parallel: bool = True,
        sequence_parallel: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        group: Group | None = None,
    ) -> None:
        super().__init__()
        columns = divide(self._get_name(), "in_features", in_features, self.join(group).size)
        self.input_is_parallel, self.sequence_parallel = input_is_parallel, sequence_parallel
        self._make((in_features, out_features), (out_features, columns), out_features if bias else None, dtype, device)

    def forward(self, input: Tensor) -> Tensor:
        return row_forward(self, input, self.input_is_parallel, self.sequence_parallel)

    def splits(self) -> Mapping[str, Split]:
        return {"weight": Split(1, self.in_features)}


def row_forward(layer: SplitLinear, input: Tensor, input_is_parallel: bool, sequence_parallel: bool) -> Tensor:
    """The forward of a layer that is split by rows."""
    if not input_is_parallel:
        input = scatter_to_tensor_region(input, layer.group)
    layer._require_width(input, ": input_is_parallel=False takes a whole input" if input_is_parallel else "")
    mode = Mode(layer.group, sequence_parallel, layer._deferred_weights(), layer.copies)
    return row_linear(input, layer.weight, layer.bias, mode)


def column_splits(layer: SplitLinear) -> Mapping[str, Split]:
    """The splits of a layer that is split by columns."""
    split = Split(0, layer.out_features)
    return {"weight": split} if layer.bias is None else {"weight": split, "bias": split}


def _uniform(bound: float) -> Draw:
    return lambda block: block.uniform_(-bound, bound)
