# Written by `make stubs` from the table of the package.
from pipeflow.megatron.parallel_state import model_parallel_cuda_manual_seed

__all__ = ["model_parallel_cuda_manual_seed"]
