"""Megatron-LM's `megatron.core.tensor_parallel.mappings`: into and out of regions that are split over the tensor ranks.
Sequences are dimension 1 of (batch, sequence, hidden).
"""

from __future__ import annotations

from torch import Tensor

from pipeflow.megatron.core.parallel_state import context_here
from pipeflow.tensor import regions


def copy_to_tensor_model_parallel_region(input_: Tensor) -> Tensor:
    """The input; its gradient is summed over the ranks."""
    return regions.copy_to_tensor_region(input_, context_here().tensor)


def reduce_from_tensor_model_parallel_region(input_: Tensor) -> Tensor:
    """The sum of the ranks' inputs; the gradient passes."""
    return regions.reduce_from_tensor_region(input_, context_here().tensor)


def scatter_to_tensor_model_parallel_region(input_: Tensor) -> Tensor:
    """This rank's piece of the last dimension; gradients are gathered."""
    return regions.scatter_to_tensor_region(input_, context_here().tensor)


def gather_from_tensor_model_parallel_region(input_: Tensor) -> Tensor:
    """The ranks' inputs along the last dimension; each takes its piece of the gradient."""
    return regions.gather_from_tensor_region(input_, context_here().tensor)


def scatter_to_sequence_parallel_region(input_: Tensor) -> Tensor:
    """This rank's piece of the sequence; gradients are gathered."""
    return regions.scatter_to_sequence_region(input_, context_here().tensor)


def gather_from_sequence_parallel_region(input_: Tensor, tensor_parallel_output_grad: bool = True) -> Tensor:
    """The whole sequence. Where each rank then computes a part, gradients are summed and scattered, else cut."""
    gather = regions.gather_to_tensor_region if tensor_parallel_output_grad else regions.gather_from_sequence_region
    return gather(input_, context_here().tensor)


def reduce_scatter_to_sequence_parallel_region(input_: Tensor) -> Tensor:
    """This rank's piece of the sequence of the ranks' sum; gradients are gathered."""
    return regions.reduce_scatter_to_sequence_region(input_, context_here().tensor)
