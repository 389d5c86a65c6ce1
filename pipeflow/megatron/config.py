"""Settings of a model of Megatron-LM: sizes, the kind of model and the kind of its layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional


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


@dataclass(frozen=True)
class ModuleSpec:
    """The class of a layer, as Megatron-LM's ModuleSpec names it."""

    module: type[nn.Module]


class ModelType(Enum):
    """Kinds of models. It has no effect: the layout decides which stages a model has."""

    encoder_or_decoder = 1
    encoder_and_decoder = 2
    retro_encoder = 3
    retro_decoder = 4
