"""Linear layers that are split by columns or by rows, classifiers, which are the last linear layer of a model, and the
two products of tensor parallelism. A backward starts the collective for the input's gradient. Then it runs the weight's
product or hands it to a Deferral. Then it waits for the collective.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional

from pipeflow.core.errors import UsageError
from pipeflow.engine.deferral.layers import DeferredWeights, Deferring, hand_over, linear, lowered
from pipeflow.engine.deferral.products import Copies, of_linear
from pipeflow.engine.parallel.grid import GridGroups
from pipeflow.engine.parallel.sharding import Split, real_rows
from pipeflow.engine.parallel.transport.protocol import Group
from pipeflow.engine.tensor.grid import PRODUCTS, TileProduct, require_ungathered
from pipeflow.engine.tensor.layer import TensorLayer, divide, divide_padded
from pipeflow.engine.tensor.random import Draw, draw_part_
from pipeflow.engine.tensor.regions import (
    SEQUENCE,
    Finish,
    gather_from_tensor_region,
    gathered,
    scatter_to_tensor_region,
    start_sum,
    start_sum_scatter,
    sum_scattered,
)
from pipeflow.engine.torch_private.tensors import unviewed


class Mode(NamedTuple):
    """The mode of a product: its group, whether the sequence is split outside the layer, the deferred weights, and the
    layer's copies in autocast's dtype. Without deferred weights, autograd computes the weight's gradient.
    """

    group: Group
    sequence: bool
    deferred: DeferredWeights | None
    copies: Copies | None = None


def column_linear(input: Tensor, weight: Tensor, bias: Tensor | None, mode: Mode) -> Tensor:
    """The columns of `input @ weight.T + bias` for this rank's rows of the weight.

    `input` is (..., in) and the same on every rank. If the sequence is split, it is this rank's piece (batch, sequence
    / T, in); it is gathered before the product and kept whole for the backward.
    """
    return _product(_Column, input, weight, bias, mode)


def row_linear(input: Tensor, weight: Tensor, bias: Tensor | None, mode: Mode) -> Tensor:
    """`input @ weight.T` summed over the ranks, each with its columns of input and weight, plus the whole bias.

    `input` is (..., in / T). The result is the same on every rank; if the sequence is split, it is this rank's piece.
    """
    return _product(_Row, input, weight, bias, mode)


def _product(function: type[Function], input: Tensor, weight: Tensor, bias: Tensor | None, mode: Mode) -> Tensor:
    if mode.group.size == 1:
        return functional.linear(input, weight, bias) if mode.deferred is None else linear(mode.deferred, input)
    if mode.sequence and input.dim() < 3:
        raise UsageError(f"sequence parallelism needs (batch, sequence, hidden), got a shape of {tuple(input.shape)}")
    weights = (None, weight, bias) if mode.deferred is None else mode.deferred[:3]
    output: Tensor = function.apply(*weights, input, mode)
    return output


class _Column(Function):
    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor | None, weight: Tensor, bias: Tensor | None, input: Tensor, mode: Mode
    ) -> Tensor:
        ctx.mode, ctx.deferred = mode, mode.deferred
        input, weight, bias = lowered(input, weight, bias, mode.copies)
        if mode.sequence:
            input = gathered(mode.group, input, SEQUENCE)
        ctx.save_for_backward(input, weight)
        made = functional.linear(input, weight, bias)
        # Views returned by a Function must not be modified in place, but models do that to queries.
        return unviewed(made)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        input, weight = ctx.saved_tensors
        rows = gradient.reshape(-1, weight.shape[0])
        finish: Finish | None = None
        if ctx.needs_input_grad[3]:
            product, (group, sequence, *_) = rows.mm(weight.conj()).view(input.shape), ctx.mode
            finish = start_sum_scatter(group, product, SEQUENCE) if sequence else start_sum(group, product)
        of_weights = _weight_gradients(ctx, input, rows)
        return None, *of_weights, None if finish is None else finish(), None


class _Row(Function):
    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor | None, weight: Tensor, bias: Tensor | None, input: Tensor, mode: Mode
    ) -> Tensor:
        ctx.mode, ctx.deferred = mode, mode.deferred
        input, weight, bias = lowered(input, weight, bias, mode.copies)
        ctx.save_for_backward(input, weight)
        part = functional.linear(input, weight)
        whole = sum_scattered(mode.group, part, SEQUENCE) if mode.sequence else start_sum(mode.group, part)()
        return whole if bias is None else whole.add_(bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        input, weight = ctx.saved_tensors
        if ctx.mode.sequence:
            gradient = gathered(ctx.mode.group, gradient, SEQUENCE)
        rows = gradient.reshape(-1, weight.shape[0])
        of_weights = _weight_gradients(ctx, input, rows)
        of_input = rows.mm(weight.conj()).view(input.shape) if ctx.needs_input_grad[3] else None
        return None, *of_weights, of_input, None


def _weight_gradients(ctx: Any, input: Tensor, rows: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of weight and bias for autograd; None for those that are deferred or not wanted.

    Raises UsageError if the backward itself must be differentiated.
    """
    if ctx.deferred is not None:
        return hand_over(ctx, of_linear, input, rows)
    if torch.is_grad_enabled():
        raise UsageError("a backward with create_graph=True cannot run through a tensor-parallel linear layer")
    _, wants_weight, wants_bias, _, _ = ctx.needs_input_grad
    of_weight = rows.t().mm(input.reshape(rows.shape[0], input.shape[-1]).conj()) if wants_weight else None
    return of_weight, rows.sum(0) if wants_bias else None


class SplitLinear(TensorLayer, Deferring):
    """Abstract base class of linear layers of which each rank has a part, with the initial values of nn.Linear.

    Attributes:
        in_features, out_features: sizes of the whole layer.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    sequence_parallel: bool
    kind: ClassVar[str]
    """The layer's kind in the table of products on a grid."""

    @property
    def tiles(self) -> TileProduct | None:
        """How a rank of a grid computes the layer; None without a grid."""
        return None if self.grid is None else TileProduct(self.grid, PRODUCTS[self.grid.grid.axes, self.kind])

    def deferred_parameters(self) -> list[nn.Parameter]:
        """Like `Deferring.deferred_parameters`; a grid sums the gradients of weights at once."""
        return super().deferred_parameters() if self.grid is None else []

    @property
    def acts_on_tokens(self) -> bool:
        """Whether the layer acts on each token alone, so that it may be given a few of them."""
        return not self.sequence_parallel

    def _make(
        self,
        sizes: tuple[int, int],
        shape: tuple[int, int],
        weight: nn.Parameter | None,
        bias: int | None,
        dtype: torch.dtype | None,
        device: torch.device | str | None,
    ) -> None:
        """Makes the parameters, from the whole layer's (in, out), the shape of this rank's weight, that weight if it is
        another layer's, and the size of the bias.
        """
        self.in_features, self.out_features = sizes
        self._owns_weight = weight is None
        if weight is None:
            weight = nn.Parameter(torch.empty(shape, dtype=dtype, device=device))
        elif tuple(weight.shape) != shape:
            name = self._get_name()
            raise UsageError(f"{name} needs a weight of shape {shape} on each rank, got {tuple(weight.shape)}")
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

    def _tile_shapes(self, in_features: int, out_features: int) -> tuple[tuple[int, int], int]:
        """The shapes of this rank's weight and of the bias on a grid, where a bias is whole."""
        assert self.tiles is not None
        over_out, over_in = self.tiles.parts
        columns = divide(self._get_name(), "in_features", in_features, over_in)
        return (self._rows(out_features, over_out), columns), out_features

    def _rows(self, out_features: int, parts: int) -> int:
        """The number of rows of each of `parts` of the weight."""
        return divide(self._get_name(), "out_features", out_features, parts)

    def splits(self) -> Mapping[str, Split]:
        assert self.tiles is not None
        return {"weight": self.tiles.split(self.out_features, self.in_features)}

    def partial_gradients(self) -> Collection[str]:
        return () if self.grid is None or self.bias is None else ("bias",)

    @classmethod
    def from_native_module(cls, module: nn.Linear, group: Group | None = None, **options: Any) -> Self:
        """This rank's part of `module`, which is not changed, with its dtype, device, mode and requires_grad.

        `options` are other arguments of this class. Raises UsageError like the class.
        """
        cls._require_native(module, nn.Linear)
        bias, dtype = module.bias is not None, module.weight.dtype
        layer = cls(module.in_features, module.out_features, bias, dtype=dtype, device="meta", group=group, **options)
        return layer._adopt(module, () if layer._owns_weight else ("weight",))

    def _require_width(self, input: Tensor, hint: str) -> None:
        width = self.weight.shape[1] if self.grid is None else self.in_features // self.grid.grid.side
        if input.shape[-1] != width:
            raise UsageError(
                f"{self._get_name()} on tensor rank {self.group.rank} takes {width} features, got a "
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
        weight: this rank's weight (out_features / T, in_features), to share another layer's; by default a new one.
        dtype, device: of the parameters, as in torch.
        group: the tensor ranks; by default the tensor group of the context, or a group of one without a launch.

    Raises UsageError if the number of tensor ranks does not divide out_features, or `weight` has another
    shape.
    """

    kind = "column"

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        gather_output: bool = False,
        sequence_parallel: bool = False,
        weight: nn.Parameter | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        group: Group | None = None,
    ) -> None:
        super().__init__()
        self.join(group)
        self.gather_output, self.sequence_parallel = gather_output, sequence_parallel
        gathers = gather_output and self.kind == "column"
        require_ungathered(self._get_name(), self.grid, sequence_parallel=sequence_parallel, gather_output=gathers)
        if self.grid is None:
            rows = self._rows(out_features, self.group.size)
            shape, of_bias = (rows, in_features), rows
        else:
            shape, of_bias = self._tile_shapes(in_features, out_features)
        self._make((in_features, out_features), shape, weight, of_bias if bias else None, dtype, device)

    def forward(self, input: Tensor) -> Tensor:
        self._require_width(input, "")
        if self.tiles is not None:
            output = self.tiles.output(input, self.weight, self.bias, self.copies)
            return gather_from_tensor_region(output, self.tiles.groups.features) if self.gather_output else output
        mode = Mode(self.group, self.sequence_parallel, self._deferred_weights(), self.copies)
        output = column_linear(input, self.weight, self.bias, mode)
        return gather_from_tensor_region(output, self.group) if self.gather_output else output

    def splits(self) -> Mapping[str, Split]:
        if self.grid is not None:
            return super().splits()
        split = Split(0, self.out_features)
        return {"weight": split} if self.bias is None else {"weight": split, "bias": split}


class RowParallelLinear(SplitLinear):
    """A linear layer of which each rank computes a part of the sum over the input features.

    The input is (..., in_features / T), as a column-parallel layer returns it, where T is the number of tensor ranks;
    the output is (..., out_features), the same on every rank. The bias is whole on every rank and is added after the
    sum; its gradient is whole, too, even if the sequence is split.

    Args:
        in_features, out_features, bias: as in nn.Linear, for the whole layer.
        input_is_parallel: True if the input is this rank's part; False if it is whole and the same on every rank.
        sequence_parallel: return this rank's piece (batch, sequence / T, out_features) of the sequence.
        weight: this rank's weight (out_features, in_features / T), to share another layer's; by default a new one.
        dtype, device: of the parameters, as in torch.
        group: the tensor ranks; by default the tensor group of the context, or a group of one without a launch.

    Raises UsageError if the number of tensor ranks does not divide in_features, or `weight` has another
    shape.
    """

    kind = "row"

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        input_is_parallel: bool = True,
        sequence_parallel: bool = False,
        weight: nn.Parameter | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        group: Group | None = None,
    ) -> None:
        super().__init__()
        self.join(group)
        self.input_is_parallel, self.sequence_parallel = input_is_parallel, sequence_parallel
        if self.grid is None:
            shape = (out_features, divide(self._get_name(), "in_features", in_features, self.group.size))
        else:
            self._require_form(self.grid)
            shape, _ = self._tile_shapes(in_features, out_features)
        self._make((in_features, out_features), shape, weight, out_features if bias else None, dtype, device)

    def _require_form(self, groups: GridGroups) -> None:
        """Raises UsageError for options that have no form on a grid."""
        options = {"sequence_parallel": self.sequence_parallel, "input_is_parallel=False": not self.input_is_parallel}
        require_ungathered(self._get_name(), groups, **options)

    def forward(self, input: Tensor) -> Tensor:
        if self.tiles is not None:
            self._require_width(input, "")
            return self.tiles.output(input, self.weight, self.bias, self.copies)
        if not self.input_is_parallel:
            input = scatter_to_tensor_region(input, self.group)
        self._require_width(input, ": input_is_parallel=False takes a whole input" if self.input_is_parallel else "")
        mode = Mode(self.group, self.sequence_parallel, self._deferred_weights(), self.copies)
        return row_linear(input, self.weight, self.bias, mode)

    def splits(self) -> Mapping[str, Split]:
        return {"weight": Split(1, self.in_features)} if self.grid is None else super().splits()


def _uniform(bound: float) -> Draw:
    return lambda block: block.uniform_(-bound, bound)


class Classifier(RowParallelLinear):
    """A RowParallelLinear that returns logits (..., num_classes), and may share its weight.

    The input is (..., in_features), the same on every rank.

    Args:
        in_features, num_classes, bias: sizes and bias of the whole layer, as in nn.Linear; any number of classes.
        weight: this rank's weight (num_classes, in_features / T), to share it with a HiddenParallelEmbedding; T is the
            number of tensor ranks. By default a new one.
        input_is_parallel: the input is this rank's part (..., in_features / T).
        dtype, device: of the parameters, as in torch.
        group: the tensor ranks; by default the tensor group of the context, or a group of one without a launch.

    Raises UsageError if T does not divide in_features, or `weight` has another shape.
    """

    kind = "classes"

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        bias: bool = True,
        *,
        weight: nn.Parameter | None = None,
        input_is_parallel: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        group: Group | None = None,
    ) -> None:
        options: dict[str, Any] = {"weight": weight, "dtype": dtype, "device": device, "group": group}
        super().__init__(in_features, num_classes, bias, input_is_parallel=input_is_parallel, **options)

    def _require_form(self, groups: GridGroups) -> None:
        if groups.grid.axes == 3 and self.input_is_parallel:
            raise UsageError(
                f"{self._get_name()} has no form with input_is_parallel=True in tensor mode '3d': leave out the "
                "column-parallel layer before it, such as representation_size of a vision transformer, or launch with "
                "tensor_mode='2d'"
            )

    def _rows(self, out_features: int, parts: int) -> int:
        return out_features


class VocabParallelClassifier(ColumnParallelLinear):
    """A ColumnParallelLinear for any number of classes: each rank returns logits (..., ceil(num_classes / T)), where T
    is the number of tensor ranks. Logits of padding, at the end of the last ranks, are -inf. It may share its weight.

    Args:
        in_features, num_classes, bias: sizes and bias of the whole layer, as in nn.Linear; any number of classes.
        weight: this rank's weight (ceil(num_classes / T), in_features), to share it with a VocabParallelEmbedding. By
            default a new one.
        gather_output: return all num_classes logits on every rank.
        sequence_parallel: the input is this rank's piece (batch, sequence / T, in_features), as in
            ColumnParallelLinear.
        dtype, device: of the parameters, as in torch.
        group: the tensor ranks; by default the tensor group of the context, or a group of one without a launch.

    Raises UsageError if `weight` has another shape.
    """

    kind = "vocabulary"

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        bias: bool = True,
        *,
        weight: nn.Parameter | None = None,
        gather_output: bool = False,
        sequence_parallel: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        group: Group | None = None,
    ) -> None:
        options: dict[str, Any] = {"weight": weight, "dtype": dtype, "device": device, "group": group}
        options |= {"gather_output": gather_output, "sequence_parallel": sequence_parallel}
        super().__init__(in_features, num_classes, bias, **options)

    def _rows(self, out_features: int, parts: int) -> int:
        return divide_padded(self._get_name(), "num_classes", out_features, self.group, parts)

    def forward(self, input: Tensor) -> Tensor:
        logits = super().forward(input)
        if self.gather_output:
            return logits[..., : self.out_features]
        columns = logits.shape[-1]
        real = real_rows(self.out_features, columns, (self.grid.features if self.grid else self.group).rank)
        return logits if real == columns else functional.pad(logits[..., :real], (0, columns - real), value=-torch.inf)
