"""A vision transformer for every layout: whole, a pipeline stage of it, and one tensor rank's part of either.

Source: arXiv 2010.11929. The layers are pipeflow.tensor's; with one tensor rank they are ordinary layers. A block keeps
its index in the whole model, which determines its rate of stochastic depth, so parameters have the same names under
every cut. Must not contain: which rank holds which stage (see `build`), or initial weights (see `initial`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import pipeflow
from pipeflow.tensor import (
    Classifier,
    ColumnParallelLinear,
    Dropout,
    LayerNorm,
    PatchEmbedding,
    RowParallelLinear,
    checkpoint,
    divide,
    feature_parts,
)
from vit.initial import initialize

Activation = Callable[[Tensor], Tensor]


class DropPath(Dropout):
    """Stochastic depth (arXiv 1603.09382): in training, each sample's whole input is set to zero with probability `p`,
    and divided by 1 - p otherwise. Tensor ranks drop the same samples. Arguments and errors are those of Dropout.
    """

    def forward(self, input: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return input
        samples = input.new_ones(len(input), *[1] * (input.dim() - 1))
        return input * super().forward(samples)


class Attention(nn.Module):
    """Multi-head self-attention over all tokens, from (batch, tokens, dim) to the same shape. One layer computes query,
    key and value, interleaved per head (its weight has heads x 3 x head size rows), so that each tensor rank has whole
    heads. `qkv_bias` says whether that layer has a bias; by default as `bias`.

    Raises UsageError if the heads do not divide dim, or if the tensor size does not divide the heads.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        dropout: float,
        bias: bool = True,
        qkv_bias: bool | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if dim % num_heads:
            raise pipeflow.UsageError(
                f"num_heads={num_heads} does not divide dim={dim}: choose a number of heads that does, or make dim a "
                f"multiple of {num_heads}"
            )
        divide("Attention", "num_heads", num_heads, feature_parts())
        self.head_size = dim // num_heads
        self.query_key_value = ColumnParallelLinear(dim, 3 * dim, bias if qkv_bias is None else qkv_bias, dtype=dtype)
        self.output = RowParallelLinear(dim, dim, bias, dtype=dtype)
        self.dropout = Dropout(dropout, parallel_input=True)

    def forward(self, tokens: Tensor) -> Tensor:
        mixed = self.query_key_value(tokens).unflatten(-1, (-1, 3, self.head_size))
        query, key, value = mixed.permute(3, 0, 2, 1, 4)
        if self.training and self.dropout.p:  # torch's function cannot draw from the rank's own generator
            seen = self.dropout((query @ key.mT / self.head_size**0.5).softmax(-1)) @ value
        else:
            seen = functional.scaled_dot_product_attention(query, key, value)
        output: Tensor = self.output(seen.transpose(1, 2).flatten(2))
        return output


class ViTEmbedding(nn.Module):
    """Converts images (batch, in_chans, img_size, img_size) to tokens (batch, 1 + patches, embedding_dim): a class
    token and one token per patch, with positions. Every tensor rank has the whole layer.

    Args:
        flatten: must be True; tokens are one sequence.
        init_method: "torch" or "jax", as in `vit.initial`.

    Raises UsageError if patch_size does not divide img_size.
    """

    def __init__(
        self,
        img_size: int = 224,
        patch_size: int = 16,
        in_chans: int = 3,
        embedding_dim: int = 768,
        dropout: float = 0.0,
        dtype: torch.dtype | None = None,
        flatten: bool = True,
        init_method: str = "torch",
    ) -> None:
        super().__init__()
        if not flatten:
            raise pipeflow.UsageError(
                "ViTEmbedding returns tokens as one sequence and does not support flatten=False: remove it"
            )
        self.patches = PatchEmbedding(img_size, patch_size, in_chans, embedding_dim, dtype=dtype)
        self.dropout = Dropout(dropout)
        initialize(self, init_method)

    def forward(self, images: Tensor) -> Tensor:
        tokens: Tensor = self.dropout(self.patches(images))
        return tokens


class ViTBlock(nn.Module):
    """One transformer block: attention, then an MLP `mlp_ratio` times as wide, each with a layer norm before it and a
    residual connection. Takes and returns tokens (batch, tokens, dim). With `checkpoint` it keeps only its input, and
    is recomputed in its backward.

    Args:
        attention_dropout: dropout probability of attention scores.
        dropout: dropout probability of the outputs of attention and MLP, and inside the MLP.
        drop_path: probability that a sample skips attention, and that it skips the MLP.
        init_method: "torch" or "jax", as in `vit.initial`.
        qkv_bias: whether query, key and value have a bias; by default as `bias`.

    Raises UsageError as Attention does.
    """

    def __init__(
        self,
        dim: int = 768,
        num_heads: int = 12,
        mlp_ratio: float = 4,
        attention_dropout: float = 0.0,
        dropout: float = 0.0,
        drop_path: float = 0.0,
        activation: Activation = functional.gelu,
        dtype: torch.dtype | None = None,
        bias: bool = True,
        checkpoint: bool = False,
        init_method: str = "torch",
        layernorm_epsilon: float = 1e-6,
        qkv_bias: bool | None = None,
    ) -> None:
        super().__init__()
        width = int(mlp_ratio * dim)
        self.norm_1 = LayerNorm(dim, eps=layernorm_epsilon, dtype=dtype)
        self.attention = Attention(dim, num_heads, dropout=attention_dropout, bias=bias, qkv_bias=qkv_bias, dtype=dtype)
        self.norm_2 = LayerNorm(dim, eps=layernorm_epsilon, dtype=dtype)
        self.wide = ColumnParallelLinear(dim, width, bias, dtype=dtype)
        self.narrow = RowParallelLinear(width, dim, bias, dtype=dtype)
        self.dropout, self.dropout_wide = Dropout(dropout), Dropout(dropout, parallel_input=True)
        self.drop_path = DropPath(drop_path)
        self.activation = activation
        self.checkpoint = checkpoint
        initialize(self, init_method)

    def forward(self, tokens: Tensor) -> Tensor:
        if self.checkpoint and torch.is_grad_enabled():
            output: Tensor = checkpoint(self._compute, tokens)
            return output
        return self._compute(tokens)

    def _compute(self, tokens: Tensor) -> Tensor:
        tokens = tokens + self.drop_path(self.dropout(self.attention(self.norm_1(tokens))))
        widened = self.dropout_wide(self.activation(self.wide(self.norm_2(tokens))))
        output: Tensor = tokens + self.drop_path(self.dropout(self.narrow(widened)))
        return output


class ViTHead(nn.Module):
    """Computes class scores from the class token: (batch, tokens, dim) to (batch, num_classes), whole on every rank.
    With `representation_size` there is a hidden layer of that width with tanh.

    Raises UsageError if the tensor size does not divide dim, or representation_size.
    """

    def __init__(
        self,
        dim: int = 768,
        num_classes: int = 1000,
        representation_size: int | None = None,
        dtype: torch.dtype | None = None,
        bias: bool = True,
        init_method: str = "torch",
    ) -> None:
        super().__init__()
        self.representation = None
        if representation_size:
            self.representation = ColumnParallelLinear(dim, representation_size, bias, dtype=dtype)
        width, split = representation_size or dim, bool(representation_size)
        self.classifier = Classifier(width, num_classes, bias, input_is_parallel=split, dtype=dtype)
        initialize(self, init_method)

    def forward(self, tokens: Tensor) -> Tensor:
        features = tokens[:, 0]
        if self.representation is not None:
            features = self.representation(features).tanh()
        scores: Tensor = self.classifier(features)
        return scores


def drop_path_of(layer: int, depth: int, last: float) -> float:
    """The rate of stochastic depth of a layer: it grows linearly from 0 in the first layer to `last` in the last."""
    return last * layer / max(1, depth - 1)


class PipelineVisionTransformer(nn.Module):
    """A stage of a vision transformer with `depth` blocks: blocks [start_idx, end_idx), with the embedding if it is the
    `first_stage`, and with the last norm and the head if it is the `last_stage`. By default it is the whole model.

    The first stage takes images (batch, in_chans, img_size, img_size); other stages take the previous stage's output,
    tokens (batch, 1 + (img_size / patch_size)^2, dim). The last stage returns scores (batch, num_classes).

    Args:
        drop_path: rate of stochastic depth of the whole model's last block, as in `drop_path_of`.
        representation_size: width of a hidden layer in the head; None for none.
        init_method: "torch" or "jax", as in `vit.initial`.
        embedding_dropout: dropout probability after the embedding; by default `dropout`, which is that of the blocks.
        qkv_bias: whether query, key and value have a bias; by default as `bias`.

    Raises UsageError as the parts do.
    """

    fits_grids = (
        True  # it has layers of pipeflow.tensor alone, and each column-parallel one is before a row-parallel one
    )

    def __init__(
        self,
        img_size: int = 224,
        patch_size: int = 16,
        in_chans: int = 3,
        num_classes: int = 1000,
        depth: int = 12,
        num_heads: int = 12,
        dim: int = 768,
        mlp_ratio: float = 4,
        attention_dropout: float = 0.0,
        dropout: float = 0.1,
        drop_path: float = 0.0,
        layernorm_epsilon: float = 1e-6,
        activation: Activation = functional.gelu,
        representation_size: int | None = None,
        dtype: torch.dtype | None = None,
        bias: bool = True,
        checkpoint: bool = False,
        init_method: str = "torch",
        first_stage: bool = True,
        last_stage: bool = True,
        start_idx: int | None = None,
        end_idx: int | None = None,
        embedding_dropout: float | None = None,
        qkv_bias: bool | None = None,
    ) -> None:
        super().__init__()
        options: dict[str, Any] = {"dtype": dtype, "init_method": init_method}
        self.layers = nn.Sequential()
        if first_stage:
            rate = dropout if embedding_dropout is None else embedding_dropout
            embedding = ViTEmbedding(img_size, patch_size, in_chans, dim, rate, **options)
            self.layers.add_module("embedding", embedding)
        for layer in range(start_idx or 0, depth if end_idx is None else end_idx):
            block = ViTBlock(
                dim,
                num_heads,
                mlp_ratio=mlp_ratio,
                attention_dropout=attention_dropout,
                dropout=dropout,
                drop_path=drop_path_of(layer, depth, drop_path),
                activation=activation,
                bias=bias,
                checkpoint=checkpoint,
                layernorm_epsilon=layernorm_epsilon,
                qkv_bias=qkv_bias,
                **options,
            )
            self.layers.add_module(str(layer), block)
        if last_stage:
            self.layers.add_module("norm", LayerNorm(dim, eps=layernorm_epsilon, dtype=dtype))
            self.layers.add_module("head", ViTHead(dim, num_classes, representation_size, bias=bias, **options))

    def forward(self, images_or_tokens: Tensor) -> Tensor:
        output: Tensor = self.layers(images_or_tokens)
        return output
