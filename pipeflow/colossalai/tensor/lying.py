"""Parts and wholes: what a rank has of a tensor, and the whole of what all ranks have."""

from __future__ import annotations

from torch import Tensor

from pipeflow.colossalai.tensor.specs import ColoTensorSpec, ShardSpec
from pipeflow.tensor.regions import gather_from_tensor_region, scatter_to_tensor_region


def part_of(whole: Tensor, spec: ColoTensorSpec) -> Tensor:
    """What this rank has of a tensor that all tensor ranks have, in memory of its own where that is less. Gradients
    are gathered.
    """
    if not isinstance(spec.dist_attr, ShardSpec) or spec.pg.tp_world_size() == 1:
        return whole
    last = whole.movedim(spec.dist_attr.dim, -1)
    return scatter_to_tensor_region(last, spec.pg.tensor).movedim(-1, spec.dist_attr.dim).contiguous()


def whole_of(part: Tensor, spec: ColoTensorSpec) -> Tensor:
    """What all tensor ranks have together; of the gradient, the same on each, every rank takes its part."""
    if not isinstance(spec.dist_attr, ShardSpec) or spec.pg.tp_world_size() == 1:
        return part
    last = part.movedim(spec.dist_attr.dim, -1)
    return gather_from_tensor_region(last, spec.pg.tensor).movedim(-1, spec.dist_attr.dim)
