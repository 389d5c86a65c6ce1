"""ColossalAI's `colossalai.tensor`: parameters that a program can split over tensor ranks."""

from __future__ import annotations

from pipeflow.colossalai.tensor.process_group import ProcessGroup
from pipeflow.colossalai.tensor.specs import ColoTensorSpec, ComputePattern, ComputeSpec, ReplicaSpec, ShardSpec
from pipeflow.colossalai.tensor.tensors import ColoParameter, ColoTensor

__all__ = [
    "ColoParameter",
    "ColoTensor",
    "ColoTensorSpec",
    "ComputePattern",
    "ComputeSpec",
    "ProcessGroup",
    "ReplicaSpec",
    "ShardSpec",
]
