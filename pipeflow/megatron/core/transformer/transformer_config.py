"""Megatron-LM's `megatron.core.transformer.transformer_config`: what is said of a model and of how it computes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional


@dataclass(kw_only=True)
class TransformerConfig:
    """What GPTModel is made from. Whatever else Megatron-LM's has is refused by name, as a TypeError.

    Attributes:
        ffn_hidden_size: the width of each layer's perceptron, a multiple of hidden_size; by default four times it.
        use_cpu_initialization: make the model on the CPU, and move it later. First weights never depend on the layout.
        params_dtype: of the weights.
        pipeline_dtype: of what passes between stages, which is params_dtype: over a pipeline no other is taken.
        init_method_std: of first weights.
        recompute_granularity: "full": each layer keeps its input, and is computed again in its backward.
        tensor_model_parallel_size, pipeline_model_parallel_size: where they are not 1, what was initialized is
            compared with them.
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
