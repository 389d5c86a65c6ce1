"""Megatron-LM's `megatron.core.distributed`: a wrapper that passes everything on, and a function that does nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from pipeflow.core.errors import UsageError
from pipeflow.megatron.config import TransformerConfig


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
