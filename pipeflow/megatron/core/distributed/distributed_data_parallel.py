"""Megatron-LM's `megatron.core.distributed.distributed_data_parallel`: a wrapper that passes everything on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from pipeflow.core.errors import UsageError
from pipeflow.megatron.core.transformer.transformer_config import TransformerConfig


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
        """Clears the gradients."""
        self.zero_grad()
