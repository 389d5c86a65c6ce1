# Written by `make stubs` from the table of the package.
from pipeflow.megatron.random_states import CudaRNGStatesTracker, checkpoint, get_cuda_rng_tracker, model_parallel_cuda_manual_seed

__all__ = ["CudaRNGStatesTracker", "checkpoint", "get_cuda_rng_tracker", "model_parallel_cuda_manual_seed"]
