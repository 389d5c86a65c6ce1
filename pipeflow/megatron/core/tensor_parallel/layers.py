"""Megatron-LM's `megatron.core.tensor_parallel.layers`: pipeflow.tensor's layers, made from a TransformerConfig. Linear
layers return a pair, whose second entry (a bias that was not added) is None.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from pipeflow.core.errors import UsageError
from pipeflow.megatron.core.transformer.transformer_config import TransformerConfig
from pipeflow.tensor import embedding, linear
from pipeflow.tensor.initialize import draw_part_
from pipeflow.tensor.layer import DeferringTensorLayer

InitMethod = Callable[[Tensor], object]


class ColumnParallelLinear(linear.ColumnParallelLinear):
    """`pipeflow.tensor.ColumnParallelLinear` that returns `(output, None)`.

    Args:
        input_size, output_size: numbers of input and output features.
        config: settings such as the dtype.
        init_method: function that fills the weight in place, a block of rows at a time; by default as in nn.Linear.
        bias: add a bias, initially zero.
        gather_output: return the whole output on every tensor rank.
        skip_bias_add: must be False if there is a bias.

    Raises UsageError for `skip_bias_add`, and if the tensor size does not divide `output_size`.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: TransformerConfig,
        init_method: InitMethod | None = None,
        bias: bool = True,
        gather_output: bool = False,
        skip_bias_add: bool = False,
    ) -> None:
        _require_bias_added(self, skip_bias_add)
        dtype, sequence_parallel = config.params_dtype, config.sequence_parallel
        super().__init__(
            input_size, output_size, bias, gather_output=gather_output, sequence_parallel=sequence_parallel, dtype=dtype
        )
        _begin(self, init_method)

    def forward(self, input_: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]  # a pair, as there
        return super().forward(input_), None


class RowParallelLinear(linear.RowParallelLinear):
    """`pipeflow.tensor.RowParallelLinear` that returns `(output, None)`. Arguments and errors are as in
    ColumnParallelLinear; `input_is_parallel` means that the input is already split over the tensor ranks.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: TransformerConfig,
        init_method: InitMethod | None = None,
        bias: bool = True,
        input_is_parallel: bool = True,
        skip_bias_add: bool = False,
    ) -> None:
        _require_bias_added(self, skip_bias_add)
        super().__init__(
            input_size,
            output_size,
            bias,
            input_is_parallel=input_is_parallel,
            sequence_parallel=config.sequence_parallel,
            dtype=config.params_dtype,
        )
        _begin(self, init_method)

    def forward(self, input_: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]  # a pair, as there
        return super().forward(input_), None


class VocabParallelEmbedding(embedding.VocabParallelEmbedding):
    """`pipeflow.tensor.VocabParallelEmbedding`. `init_method` is as in ColumnParallelLinear; with
    `reduce_scatter_embeddings` it returns this rank's part of the sequence.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        config: TransformerConfig,
        init_method: InitMethod | None = None,
        reduce_scatter_embeddings: bool = False,
    ) -> None:
        dtype = config.params_dtype
        super().__init__(num_embeddings, embedding_dim, sequence_parallel=reduce_scatter_embeddings, dtype=dtype)
        _begin(self, init_method)


def _require_bias_added(layer: object, skip_bias_add: bool) -> None:
    if skip_bias_add:
        raise UsageError(f"{type(layer).__name__} adds its bias itself: remove skip_bias_add, or pass bias=False")


def _begin(layer: DeferringTensorLayer, init_method: InitMethod | None) -> None:
    """Initializes a layer's weight, and sets its bias to zero."""
    if init_method is not None:
        draw_part_(layer.get_parameter("weight"), init_method, split=layer.splits()["weight"], rank=layer.group.rank)
    if layer._parameters.get("bias") is not None:
        layer.get_parameter("bias").data.zero_()
