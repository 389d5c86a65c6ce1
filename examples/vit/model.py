"""A vision transformer for every layout: whole, a pipeline stage of it, and one tensor rank's part of either.

Source: arXiv 2010.11929. The layers are pipeflow.tensor's, which with one tensor rank are ordinary ones. A stage has
the blocks that it is given and, where it is the first or the last, what belongs to that end of the model. A block keeps
the index that it has in the whole model: so parameters have the same name under every cut, and its rate of stochastic
depth follows. What is not here: which rank holds what (`build`), and how first weights are drawn (`initial`).
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
    group_of,
)
from vit.initial import initialize

Activation = Callable[[Tensor], Tensor]


class DropPath(Dropout):
    """Stochastic depth (arXiv 1603.09382): in training, each sample's whole input becomes zero with probability `p`,
    and is divided by 1 - p otherwise. Tensor ranks drop the same samples. Arguments and errors are Dropout's.
    """

    def forward(self, input: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return input
        samples = input.new_ones(len(input), *[1] * (input.dim() - 1))
        return input * super().forward(samples)


class Attention(nn.Module):
    """Self-attention in heads, (batch, tokens, dim) to the same, in which every token sees all. Query, key and value
    come out of one layer, interleaved per head (its weight is one of heads x 3 x head size rows), so that its parts on
    the tensor ranks are whole heads. `qkv_bias` says whether that layer has a bias; by default as `bias`.

    Raises UsageError when the heads do not divide dim, or the tensor size does not divide the heads.
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
        divide("Attention", "num_heads", num_heads, group_of(None).size)
        self.head_size = dim // num_heads
        self.query_key_value = ColumnParallelLinear(dim, 3 * dim, bias if qkv_bias is None else qkv_bias, dtype=dtype)
        self.output = RowParallelLinear(dim, dim, bias, dtype=dtype)
        self.dropout = Dropout(dropout, parallel_input=True)

    def forward(self, tokens: Tensor) -> Tensor:
        mixed = self.query_key_value(tokens).unflatten(-1, (-1, 3, self.head_size))
        query, key, value = mixed.permute(3, 0, 2, 1, 4)
        if self.training and self.dropout.p:  # of the rank's own random numbers, which torch's function cannot be given
            seen = self.dropout((query @ key.mT / self.head_size**0.5).softmax(-1)) @ value
        else:
            seen = functional.scaled_dot_product_attention(query, key, value)
        output: Tensor = self.output(seen.transpose(1, 2).flatten(2))
        return output


class ViTEmbedding(nn.Module):
    """Images (batch, in_chans, img_size, img_size) to tokens (batch, 1 + patches, embedding_dim): a class token and one
    per patch, with positions. Whole on every tensor rank.

    Args:
        flatten: always True: tokens stand in a row.
        init_method: "torch" or "jax", as of `vit.initial`.

    Raises UsageError when patch_size does not divide img_size.
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
            raise pipeflow.UsageError("ViTEmbedding gives tokens in a row, so flatten=False cannot be: leave it out")
        self.patches = PatchEmbedding(img_size, patch_size, in_chans, embedding_dim, dtype=dtype)
        self.dropout = Dropout(dropout)
        initialize(self, init_method)

    def forward(self, images: Tensor) -> Tensor:
        tokens: Tensor = self.dropout(self.patches(images))
        return tokens


class ViTBlock(nn.Module):
    """One layer: attention, then a perceptron `mlp_ratio` times as wide, each behind its norm and beside its input.
    Takes and gives tokens, (batch, tokens, dim). With `checkpoint` it keeps its input alone, and is computed again in
    its backward.

    Args:
        attention_dropout: of the attention's weights.
        dropout: of what either half computes, and inside the perceptron.
        drop_path: the probability that a sample skips a half.
        init_method: "torch" or "jax", as of `vit.initial`.
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
    """Scores of the classes from the class token: (batch, tokens, dim) to (batch, num_classes), whole on every rank;
    with `representation_size` by way of a hidden layer of that width, and tanh.

    Raises UsageError when the tensor size does not divide dim, or representation_size.
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
    """The rate of stochastic depth of a layer of the whole model: from 0 in the first to `last` in the last, evenly."""
    return last * layer / max(1, depth - 1)


class PipelineVisionTransformer(nn.Module):
    """Blocks [start_idx, end_idx) of a vision transformer of `depth`; with the embedding where it is the `first_stage`,
    with the last norm and the head where it is the `last_stage`. Unless told otherwise, the whole model.

    The first stage takes images (batch, in_chans, img_size, img_size); every other the output of the one before it,
    tokens (batch, 1 + (img_size / patch_size)^2, dim). The last makes scores (batch, num_classes).

    Args:
        drop_path: the rate of stochastic depth of the whole model's last layer, as of `drop_path_of`.
        representation_size: of a hidden layer in the head; None for none.
        init_method: "torch" or "jax", as of `vit.initial`.
        embedding_dropout: dropout after the embedding; by default `dropout`, which is that of the blocks.
        qkv_bias: whether query, key and value have a bias; by default as `bias`.

    Raises UsageError as the parts do.
    """

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
