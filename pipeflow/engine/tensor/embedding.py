"""Embeddings that are split over the tensor ranks, by vocabulary or by hidden dimension, and PatchEmbedding, the first
layer of a vision transformer, which is whole on every rank.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipeflow.core.errors import UsageError
from pipeflow.engine.deferral.layers import Deferring, look_up
from pipeflow.engine.parallel.sharding import Split
from pipeflow.engine.parallel.transport.protocol import Group
from pipeflow.engine.tensor.grid import (
    gather_rows,
    own_features,
    require_divisible,
    require_ungathered,
    scatter_rows,
    split_over,
)
from pipeflow.engine.tensor.layer import TensorLayer, divide, divide_padded, require_indices
from pipeflow.engine.tensor.random import draw_part_
from pipeflow.engine.tensor.regions import (
    gather_from_tensor_region,
    reduce_from_tensor_region,
    reduce_scatter_to_sequence_region,
)


class SplitEmbedding(TensorLayer, Deferring):
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

    def _shape_of_rows(self, num_embeddings: int, embedding_dim: int) -> tuple[int, int]:
        """The shape of this rank's part of a table that is divided by rows, on a grid also by columns."""
        name, groups = self._get_name(), self.grid
        if groups is None:
            return divide_padded(name, "num_embeddings", num_embeddings, self.group), embedding_dim
        rows = divide_padded(name, "num_embeddings", num_embeddings, self.group, groups.grid.sample_parts)
        return rows, divide(name, "embedding_dim", embedding_dim, groups.grid.side)

    def _place(self) -> int:
        """Which part of the rows this rank has."""
        return (
            self.group.rank if self.grid is None else self.grid.grid.index(self.grid.rank, self.grid.grid.sample_axes)
        )

    def _local_padding(self) -> int | None:
        """The row of this rank's weight that belongs to padding_idx."""
        if self.padding_idx is None:
            return None
        rows = self.weight.shape[0]
        place, row = divmod(self.padding_idx, rows)
        return row if place == self._place() else None

    def splits(self) -> Mapping[str, Split]:
        if self.grid is None:
            return {"weight": Split(0, self.num_embeddings)}
        grid = self.grid.grid
        sizes, axes = (self.num_embeddings, self.embedding_dim), (grid.sample_axes, (grid.FEATURES,))
        return {"weight": split_over(grid, sizes, axes)}

    def _look_up(self, indices: Tensor) -> Tensor:
        """Rows of this rank's weight; the row of padding_idx gets no gradient."""
        deferred, padding = self._deferred_weights(), self._local_padding()
        if deferred is None:
            return functional.embedding(indices, self.weight, padding)
        return look_up(deferred, indices, padding)

    @classmethod
    def from_native_module(cls, module: nn.Embedding, group: Group | None = None, **options: Any) -> Self:
        """This rank's part of `module`, which is not changed, with its dtype, device, mode and requires_grad.

        `options` are other arguments of this class. Raises UsageError like the class, and for max_norm, sparse and
        scale_grad_by_freq, which a split embedding does not support.
        """
        cls._require_native(module, nn.Embedding)
        if module.max_norm is not None or module.sparse or module.scale_grad_by_freq:
            raise UsageError(f"{cls.__name__} has no max_norm, sparse or scale_grad_by_freq: leave them out")
        given: dict[str, Any] = {"padding_idx": module.padding_idx, "dtype": module.weight.dtype, "device": "meta"}
        layer = cls(module.num_embeddings, module.embedding_dim, group=group, **given | options)
        return layer._adopt(module)

    def extra_repr(self) -> str:
        part = f", {self.group.rank} of {self.group.size}" if self.group.size > 1 else ""
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        return f"{self.num_embeddings}, {self.embedding_dim}{padding}{part}"


class VocabParallelEmbedding(SplitEmbedding):
    """An embedding of which each rank has ceil(num_embeddings / T) rows, padded at the end, where T is the number of
    tensor ranks.

    The input is indices of any shape, the same on every rank; the output is (..., embedding_dim), summed over the
    ranks. On a grid the input is the indices of this rank's samples, (samples, ...), which are gathered. Each rank
    looks up those of its rows, and gets its samples of the sum.

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
        self.join(group)
        self.sequence_parallel = sequence_parallel
        require_ungathered(self._get_name(), self.grid, sequence_parallel=sequence_parallel)
        sizes = num_embeddings, embedding_dim
        self._make(sizes, self._shape_of_rows(*sizes), padding_idx, dtype, device)

    def forward(self, input: Tensor) -> Tensor:
        require_indices(input, self.num_embeddings, "indices of an embedding")
        group, rows = self.group, self.weight.shape[0]
        if group.size == 1:
            return self._look_up(input)
        axes = () if self.grid is None else self.grid.grid.sample_axes
        if self.grid is not None:
            input = gather_rows(self.grid, axes, input)
        local = input - self._place() * rows
        elsewhere = (local < 0) | (local >= rows)
        part = self._look_up(local.masked_fill(elsewhere, 0))
        part = part.masked_fill_(elsewhere.unsqueeze(-1), 0)
        if self.grid is not None:
            return scatter_rows(self.grid, axes, part)
        if self.sequence_parallel:
            return reduce_scatter_to_sequence_region(part, group)
        return reduce_from_tensor_region(part, group)


class HiddenParallelEmbedding(SplitEmbedding):
    """An embedding of which each rank has embedding_dim / T columns, where T is the number of tensor ranks.

    The input is indices of any shape, the same on every rank; the output is (..., embedding_dim), gathered on every
    rank. On a grid, which divides the table by rows, too, each rank gathers the rows of its columns.

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
        self.join(group)
        if self.grid is None:
            shape = num_embeddings, divide(self._get_name(), "embedding_dim", embedding_dim, self.group.size)
        else:
            shape = self._shape_of_rows(num_embeddings, embedding_dim)
        self._make((num_embeddings, embedding_dim), shape, padding_idx, dtype, device)

    def deferred_parameters(self) -> list[nn.Parameter]:
        """Like `Deferring.deferred_parameters`; a grid sums the gradients of the table at once."""
        return super().deferred_parameters() if self.grid is None else []

    def forward(self, input: Tensor) -> Tensor:
        require_indices(input, self.num_embeddings, "indices of an embedding")
        if self.grid is None:
            return gather_from_tensor_region(self._look_up(input), self.group)
        table = gather_rows(self.grid, self.grid.grid.sample_axes, self.weight)
        return functional.embedding(input, table, self.padding_idx)

    def _local_padding(self) -> int | None:
        return self.padding_idx if self.grid is None else super()._local_padding()

    def splits(self) -> Mapping[str, Split]:
        return {"weight": Split(1, self.embedding_dim)} if self.grid is None else super().splits()


class PatchEmbedding(TensorLayer):
    """Turns images (batch, channels, height, width) into tokens (batch, 1 + patches, embed_dim): a class token and a
    linear map of each patch, plus positions. Every rank holds and computes all of it; on a grid it holds all, and
    computes its features. Source: arXiv 2010.11929, section 3.1.

    Args:
        image_size, patch_size: sides of the square images and patches in pixels; patch_size must divide image_size.
        in_channels: number of channels of an image.
        embed_dim: size of a token.
        dtype, device: of the parameters, as in torch.
        group: the tensor ranks; by default the tensor group of the context, or a group of one without a launch.

    Raises UsageError if patch_size does not divide image_size, and for images of another size.
    """

    def __init__(
        self,
        image_size: int,
        patch_size: int,
        in_channels: int,
        embed_dim: int,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        group: Group | None = None,
    ) -> None:
        super().__init__()
        self.join(group)
        if image_size % patch_size:
            fitting = max(1, image_size // patch_size) * patch_size
            raise UsageError(
                f"{self._get_name()}: patch_size={patch_size} does not divide image_size={image_size}: resize the "
                f"images to {fitting}, or choose a patch size that divides {image_size}"
            )
        if self.grid is not None:
            require_divisible(self._get_name(), self.grid, "embed_dim", [embed_dim])
        self.image_size = image_size
        options: dict[str, Any] = {"dtype": dtype, "device": device}
        self.projection = nn.Conv2d(in_channels, embed_dim, patch_size, stride=patch_size, **options)
        self.class_token = nn.Parameter(torch.empty(1, 1, embed_dim, **options))
        self.positions = nn.Parameter(torch.empty(1, 1 + (image_size // patch_size) ** 2, embed_dim, **options))
        self._reset_tokens()

    def reset_parameters(self) -> None:
        """Draws the convolution as nn.Conv2d does, and the positions from a normal distribution with standard deviation
        0.02. The class token is zero.
        """
        self.projection.reset_parameters()
        self._reset_tokens()

    def _reset_tokens(self) -> None:
        nn.init.zeros_(self.class_token)
        nn.init.normal_(self.positions, std=0.02)

    def forward(self, images: Tensor) -> Tensor:
        if tuple(images.shape[-2:]) != (self.image_size, self.image_size):
            size = self.image_size
            raise UsageError(
                f"{self._get_name()} takes images of {size} x {size}, got a shape of {tuple(images.shape)}"
            )
        token: Tensor = self.class_token
        positions: Tensor = self.positions
        if (groups := self.grid) is None:
            patches = self.projection(images).flatten(2).transpose(1, 2)
        else:
            weight, bias = (own_features(groups, each, dim=0) for each in self.projection.parameters())
            made = functional.conv2d(images, weight, bias, self.projection.stride)
            patches = made.flatten(2).transpose(1, 2)
            token, positions = own_features(groups, token), own_features(groups, positions)
        tokens = torch.cat([token.expand(len(images), -1, -1).to(patches.dtype), patches], dim=1)
        return tokens + positions

    def partial_gradients(self) -> Collection[str]:
        return () if self.grid is None else [name for name, _ in self.named_parameters()]

    @classmethod
    def from_native_module(cls, module: nn.Conv2d, group: Group | None = None, *, image_size: int) -> Self:
        """A layer with the convolution of `module`, which is not changed and whose patches must not overlap, and new
        positions. Load trained tokens into `class_token` and `positions`. Raises UsageError for another convolution.
        """
        if not isinstance(module, nn.Conv2d) or module.kernel_size != module.stride or module.groups != 1:
            raise UsageError(
                f"{cls.__name__} is made from an nn.Conv2d whose stride equals its kernel size, got {module}"
            )
        if module.kernel_size[0] != module.kernel_size[1] or module.bias is None or module.padding not in (0, (0, 0)):
            raise UsageError(f"{cls.__name__} is made from a square nn.Conv2d with bias and no padding, got {module}")
        weight, bias = module.weight, module.bias
        options: dict[str, Any] = {"dtype": weight.dtype, "device": weight.device, "group": group}
        layer = cls(image_size, module.kernel_size[0], module.in_channels, module.out_channels, **options)
        layer.projection.load_state_dict({"weight": weight, "bias": bias})
        layer.projection.weight.requires_grad_(weight.requires_grad)
        layer.projection.bias.requires_grad_(bias.requires_grad)  # type: ignore[union-attr]  # made with one
        return layer.train(module.training)
