"""Parts and wholes of tensors: splits a whole into this rank's part, and gathers the parts of all ranks."""

from __future__ import annotations

from torch import Tensor

from pipeflow.colossalai.tensor.specs import ColoTensorSpec, ShardSpec
from pipeflow.tensor.regions import gather_from_tensor_region, scatter_to_tensor_region


def part_of(whole: Tensor, spec: ColoTensorSpec) -> Tensor:
    """This rank's part of a whole tensor, copied if it is smaller. Its backward gathers the gradients."""
    if not isinstance(spec.dist_attr, ShardSpec) or spec.pg.tp_world_size() == 1:
        return whole
    last = whole.movedim(spec.dist_attr.dim, -1)
    return scatter_to_tensor_region(last, spec.pg.tensor).movedim(-1, spec.dist_attr.dim).contiguous()


def whole_of(part: Tensor, spec: ColoTensorSpec) -> Tensor:
    """The whole tensor, gathered from all tensor ranks. In its backward every rank takes its part of the gradient."""
    if not isinstance(spec.dist_attr, ShardSpec) or spec.pg.tp_world_size() == 1:
        return part
    last = part.movedim(spec.dist_attr.dim, -1)
    return gather_from_tensor_region(last, spec.pg.tensor).movedim(-1, spec.dist_attr.dim)
