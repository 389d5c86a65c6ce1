# Written by `make stubs` from the table of the package.
from pipeflow.colossalai.tensors import ColoParameter, ColoTensor, ColoTensorSpec, ComputePattern, ComputeSpec, ProcessGroup, ReplicaSpec, ShardSpec

__all__ = ["ColoParameter", "ColoTensor", "ColoTensorSpec", "ComputePattern", "ComputeSpec", "ProcessGroup", "ReplicaSpec", "ShardSpec"]
