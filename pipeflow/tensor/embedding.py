"""Embeddings that are split over the tensor ranks, by vocabulary or by hidden dimension."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional

from pipeflow.core.errors import UsageError
from pipeflow.deferral.layers import DeferredWeights, hand_over
from pipeflow.deferral.products import EmbeddingProduct
from pipeflow.parallel.sharding import Split
from pipeflow.parallel.transport.group import Group
from pipeflow.tensor.division import adopt, divide, divide_padded, require_indices
from pipeflow.tensor.initialize import draw_part_
from pipeflow.tensor.layer import DeferringTensorLayer
from pipeflow.tensor.regions import (
    gather_from_tensor_region,
    reduce_from_tensor_region,
    reduce_scatter_to_sequence_region,
)


class SplitEmbedding(DeferringTensorLayer):
    """Abstract base class of embeddings of which each rank has a part, with the initial values of nn.Embedding.

    Attributes:
        num_embeddings, embedding_dim: sizes of the whole layer.
        padding_idx: index whose entry gets no gradient, or None.
    """

    weight: nn.Parameter

    def _make(
        self,
        sizes: tuple[int, int],
        shape: tuple[int, int],
        padding_idx: int | None,
        dtype: torch.dtype | None,
        device: torch.device | str | None,
    ) -> None:
        self.num_embeddings, self.embedding_dim = sizes
        if padding_idx is not None:
            if not -self.num_embeddings <= padding_idx < self.num_embeddings:
                raise UsageError(f"padding_idx={padding_idx} is out of range for {self.num_embeddings} embeddings")
            padding_idx %= self.num_embeddings
        self.padding_idx = padding_idx
        self.weight = nn.Parameter(torch.empty(shape, dtype=dtype, device=device))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the full weight from torch's default generator, like nn.Embedding, and keeps this rank's part."""
        draw_part_(self.weight, Tensor.normal_, split=self.splits()["weight"], rank=self.group.rank)
        padding = self._local_padding()
        if padding is not None:
            with torch.no_grad():
                self.weight[padding].fill_(0)

    def _local_padding(self) -> int | None:
        """The row of this rank's weight that belongs to padding_idx."""
        return self.padding_idx

    @classmethod
    def from_native_module(cls, module: nn.Embedding, group: Group | None = None, **options: Any) -> Self:
        """This rank's part of `module`, which is not changed, with its dtype, device, mode and requires_grad.

        `options` are other arguments of this class. Raises UsageError like the class, and for max_norm, sparse and
        scale_grad_by_freq, which a split embedding does not support.
        """
        if not isinstance(module, nn.Embedding):
            raise UsageError(f"{cls.__name__} is made from an nn.Embedding, got {type(module).__name__}")
        if module.max_norm is not None or module.sparse or module.scale_grad_by_freq:
            raise UsageError(f"{cls.__name__} has no max_norm, sparse or scale_grad_by_freq: leave them out")
        given: dict[str, Any] = {"padding_idx": module.padding_idx, "dtype": module.weight.dtype, "device": "meta"}
        layer = cls(module.num_embeddings, module.embedding_dim, group=group, **given | options)
        adopt(layer, module._parameters, layer.splits(), layer.group)
        return layer.train(module.training)

    def extra_repr(self) -> str:
        part = f", {self.group.rank} of {self.group.size}" if self.group.size > 1 else ""
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        return f"{self.num_embeddings}, {self.embedding_dim}{padding}{part}"


class VocabParallelEmbedding(SplitEmbedding):
    """An embedding of which each rank has ceil(num_embeddings / T) rows, padded at the end, where T is the number of
    tensor ranks.

    The input is indices of any shape, the same on every rank; the output is (..., embedding_dim), summed over the
    ranks.

    Args:
        num_embeddings, embedding_dim, padding_idx: as in nn.Embedding, for the whole layer.
        sequence_parallel: return this rank's piece (batch, sequence / T, embedding_dim) for an input (batch, sequence).
        dtype, device: of the parameters, as in torch.
        group: the tensor ranks; by default the tensor group of the context, or a group of one without a launch.

    Raises UsageError for an index outside the vocabulary; on a GPU a device assertion fails instead.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        *,
        sequence_parallel: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        group: Group | None = None,
    ) -> None:
        super().__init__()
        rows = divide_padded(self._get_name(), "num_embeddings", num_embeddings, self.join(group))
        self.sequence_parallel = sequence_parallel
        self._make((num_embeddings, embedding_dim), (rows, embedding_dim), padding_idx, dtype, device)

    def forward(self, input: Tensor) -> Tensor:
        require_indices(input, self.num_embeddings, "indices of an embedding")
        group, rows = self.group, self.weight.shape[0]
        if group.size == 1:
            return look_up(self, input, self.padding_idx)
        local = input - group.rank * rows
        elsewhere = (local < 0) | (local >= rows)
        part = look_up(self, local.masked_fill(elsewhere, 0), self._local_padding())
        part = part.masked_fill_(elsewhere.unsqueeze(-1), 0)
        if self.sequence_parallel:
            return reduce_scatter_to_sequence_region(part, group)
        return reduce_from_tensor_region(part, group)

    def _local_padding(self) -> int | None:
        if self.padding_idx is None:
            return None
        rows = self.weight.shape[0]
        rank, row = divmod(self.padding_idx, rows)
        return row if rank == self.group.rank else None

    def splits(self) -> Mapping[str, Split]:
        return {"weight": Split(0, self.num_embeddings)}


class HiddenParallelEmbedding(SplitEmbedding):
    """An embedding of which each rank has embedding_dim / T columns, where T is the number of tensor ranks.

    The input is indices of any shape, the same on every rank; the output is (..., embedding_dim), gathered on every
    rank.

    Args:
        num_embeddings, embedding_dim, padding_idx: as in nn.Embedding, for the whole layer.
        dtype, device: of the parameters, as in torch.
        group: the tensor ranks; by default the tensor group of the context, or a group of one without a launch.

    Raises UsageError if T does not divide embedding_dim, and for an index like VocabParallelEmbedding.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        group: Group | None = None,
    ) -> None:
        super().__init__()
        columns = divide(self._get_name(), "embedding_dim", embedding_dim, self.join(group).size)
        self._make((num_embeddings, embedding_dim), (num_embeddings, columns), padding_idx, dtype, device)

    def forward(self, input: Tensor) -> Tensor:
        require_indices(input, self.num_embeddings, "indices of an embedding")
        return gather_from_tensor_region(look_up(self, input, self.padding_idx), self.group)

    def splits(self) -> Mapping[str, Split]:
        return {"weight": Split(1, self.embedding_dim)}


def look_up(layer: SplitEmbedding, indices: Tensor, padding: int | None) -> Tensor:
    """Rows of this rank's weight; row `padding` gets no gradient."""
    deferred = layer._deferred_weights()
    if deferred is None:
        return functional.embedding(indices, layer.weight, padding)
    output: Tensor = _LookUp.apply(*deferred.inputs, indices, deferred, padding)  # type: ignore[no-untyped-call]  # torch's
    return output


class _LookUp(Function):
    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor,
        weight: Tensor,
        bias: None,
        indices: Tensor,
        deferred: DeferredWeights,
        padding: int | None,
    ) -> Tensor:
        ctx.deferred, ctx.padding = deferred, -1 if padding is None else padding
        ctx.save_for_backward(indices)
        return functional.embedding(indices, weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        [indices] = ctx.saved_tensors
        product = EmbeddingProduct(ctx.deferred.weight, indices, gradient, ctx.padding, False)
        return None, *hand_over(ctx, product), None, None, None
