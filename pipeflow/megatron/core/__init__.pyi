# Written by `make stubs` from the table of the package.
from pipeflow.megatron.core import parallel_state, parallel_state as mpu, tensor_parallel

__all__ = ["mpu", "parallel_state", "tensor_parallel"]
