"""Megatron-LM's TransformerConfig, and its `megatron.core.tensor_parallel`: layers of `pipeflow.tensor`, made from a
TransformerConfig; functions that move tensors into and out of regions that are split over the tensor ranks; and a
cross-entropy. Linear layers return a pair, whose second entry (a bias that was not added) is None. Sequences are
dimension 1 of (batch, sequence, hidden).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from pipeflow.core.errors import UsageError
from pipeflow.engine.tensor import cross_entropy, embedding, linear, regions
from pipeflow.engine.tensor.layer import TensorLayer
from pipeflow.engine.tensor.random import draw_part_
from pipeflow.megatron.parallel_state import context_here


@dataclass(kw_only=True)
class TransformerConfig:
    """Sizes and settings of a GPTModel. Other options of Megatron-LM's class raise a TypeError that names them.

    Attributes:
        num_layers: number of layers of the whole model.
        hidden_size: width of the hidden states.
        num_attention_heads: number of heads; must divide `hidden_size`.
        ffn_hidden_size: width of each layer's MLP, a multiple of hidden_size; by default 4 * hidden_size.
        hidden_dropout: dropout probability of the outputs of attention and MLP, and of the embedding.
        attention_dropout: dropout probability of attention scores.
        layernorm_epsilon: epsilon of the layer norms.
        activation_func: activation function of the MLPs.
        init_method_std: standard deviation of initial weights, which never depend on the layout.
        use_cpu_initialization: make the model on the CPU, to be moved later.
        params_dtype: dtype of the weights.
        pipeline_dtype: dtype of tensors between stages; in a pipeline it must be params_dtype.
        sequence_parallel: split the hidden states over the tensor ranks by length.
        recompute_granularity: "full": each layer keeps only its input, and is recomputed in its backward.
        tensor_model_parallel_size, pipeline_model_parallel_size: if not 1, they must be the initialized sizes.
    """

    num_layers: int
    hidden_size: int
    num_attention_heads: int
    ffn_hidden_size: int | None = None
    hidden_dropout: float = 0.1
    attention_dropout: float = 0.1
    layernorm_epsilon: float = 1e-5
    activation_func: Callable[[Tensor], Tensor] = functional.gelu
    init_method_std: float = 0.02
    use_cpu_initialization: bool = False
    params_dtype: torch.dtype = torch.float32
    pipeline_dtype: torch.dtype | None = None
    sequence_parallel: bool = False
    recompute_granularity: Literal["full"] | None = None
    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1


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


def _begin(layer: TensorLayer, init_method: InitMethod | None) -> None:
    """Initializes a layer's weight, and sets its bias to zero."""
    if init_method is not None:
        draw_part_(layer.get_parameter("weight"), init_method, split=layer.splits()["weight"], rank=layer.group.rank)
    if layer._parameters.get("bias") is not None:
        layer.get_parameter("bias").data.zero_()


def copy_to_tensor_model_parallel_region(input_: Tensor) -> Tensor:
    """Returns the input; the backward sums its gradient over the ranks."""
    return regions.copy_to_tensor_region(input_, context_here().tensor)


def reduce_from_tensor_model_parallel_region(input_: Tensor) -> Tensor:
    """Returns the sum of the ranks' inputs; the backward passes the gradient on."""
    return regions.reduce_from_tensor_region(input_, context_here().tensor)


def scatter_to_tensor_model_parallel_region(input_: Tensor) -> Tensor:
    """Returns this rank's part of the last dimension; the backward gathers gradients."""
    return regions.scatter_to_tensor_region(input_, context_here().tensor)


def gather_from_tensor_model_parallel_region(input_: Tensor) -> Tensor:
    """Gathers the ranks' inputs along the last dimension; in the backward each takes its part of the gradient."""
    return regions.gather_from_tensor_region(input_, context_here().tensor)


def scatter_to_sequence_parallel_region(input_: Tensor) -> Tensor:
    """Returns this rank's part of the sequence; the backward gathers gradients."""
    return regions.scatter_to_sequence_region(input_, context_here().tensor)


def gather_from_sequence_parallel_region(input_: Tensor, tensor_parallel_output_grad: bool = True) -> Tensor:
    """Gathers the whole sequence. The backward sums and scatters gradients; with `tensor_parallel_output_grad=False`,
    for a region in which all ranks compute the same, it only takes this rank's part.
    """
    gather = regions.gather_to_tensor_region if tensor_parallel_output_grad else regions.gather_from_sequence_region
    return gather(input_, context_here().tensor)


def reduce_scatter_to_sequence_parallel_region(input_: Tensor) -> Tensor:
    """Sums the ranks' inputs and returns this rank's part of the sequence; the backward gathers gradients."""
    return regions.reduce_scatter_to_sequence_region(input_, context_here().tensor)


def vocab_parallel_cross_entropy(vocab_parallel_logits: Tensor, target: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """Returns the loss of each token, (...), from this rank's part of the logits (..., words / T) and labels (...)."""
    return cross_entropy.vocab_parallel_cross_entropy(
        vocab_parallel_logits, target, label_smoothing=label_smoothing, reduction="none"
    )
