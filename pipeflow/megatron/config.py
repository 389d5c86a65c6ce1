"""Settings of a model of Megatron-LM: sizes, the kind of model and the kind of its layers; and
`megatron.core.distributed`: a wrapper that passes everything on, and a function that does nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipeflow.core.errors import UsageError


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


@dataclass(frozen=True, kw_only=True)
class DistributedDataParallelConfig:
    """Settings of reductions over replicas. Other options of Megatron-LM's class raise a TypeError that names them.

    Attributes:
        grad_reduce_in_fp32: must be False: gradients are averaged in their own dtype.
        overlap_grad_reduce: has no effect: reductions always overlap computations.
        use_distributed_optimizer: must be False.
        check_for_nan_in_grad, bucket_size: have no effect.

    Raises UsageError for values that are not supported.
    """

    grad_reduce_in_fp32: bool = False
    overlap_grad_reduce: bool = False
    use_distributed_optimizer: bool = False
    check_for_nan_in_grad: bool = False
    bucket_size: int | None = None

    def __post_init__(self) -> None:
        if self.grad_reduce_in_fp32:
            raise UsageError("grad_reduce_in_fp32=True is not supported: gradients are averaged in their own dtype")
        if self.use_distributed_optimizer:
            raise UsageError("use_distributed_optimizer=True is not supported: wrap the optimizer with pipeflow.Zero")


class DistributedDataParallel(nn.Module):
    """A stage, which it calls. Every step averages gradients over the replicas without it.

    Args:
        config: settings of the model.
        ddp_config: settings of reductions.
        module: this rank's stage.
    """

    def __init__(self, config: TransformerConfig, ddp_config: DistributedDataParallelConfig, module: nn.Module) -> None:
        super().__init__()
        self.config, self.ddp_config, self.module = config, ddp_config, module

    def forward(self, *inputs: Any, **options: Any) -> Any:
        return self.module(*inputs, **options)

    def set_input_tensor(self, input_tensor: Tensor | None) -> None:
        """Sets the input of the stage's next call."""
        self.module.set_input_tensor(input_tensor)  # type: ignore[operator]  # a method

    def zero_grad_buffer(self) -> None:
        """Clears the gradients of all parameters."""
        self.zero_grad()


def finalize_model_grads(model: Sequence[nn.Module], num_tokens: Tensor | None = None) -> None:
    """Does nothing: every step ends with these sums over replicas, tied weights and tensor ranks.

    Args:
        model: this rank's stages.
        num_tokens: must be None; to average over tokens, return their number from the loss function.

    Raises UsageError for `num_tokens`.
    """
    if num_tokens is not None:
        raise UsageError(
            "finalize_model_grads takes no num_tokens: let the loss function return (sum of losses, number of tokens, "
            "values to log)"
        )
