# Written by `make stubs` from the table of the package.
from pipeflow.megatron.data_parallel import finalize_model_grads

__all__ = ["finalize_model_grads"]
