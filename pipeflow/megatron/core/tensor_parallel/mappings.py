"""Megatron-LM's `megatron.core.tensor_parallel.mappings`: moves tensors into and out of regions that are split over the
tensor ranks. Sequences are dimension 1 of (batch, sequence, hidden).
"""

from __future__ import annotations

from torch import Tensor

from pipeflow.megatron.core.parallel_state import context_here
from pipeflow.tensor import regions


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
