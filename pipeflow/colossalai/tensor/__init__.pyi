# Written by `make stubs` from the table of the package.
from pipeflow.colossalai.tensor_specs import ColoTensorSpec, ComputePattern, ComputeSpec, ProcessGroup, ReplicaSpec, ShardSpec
from pipeflow.colossalai.tensors import ColoParameter, ColoTensor

__all__ = ["ColoParameter", "ColoTensor", "ColoTensorSpec", "ComputePattern", "ComputeSpec", "ProcessGroup", "ReplicaSpec", "ShardSpec"]
