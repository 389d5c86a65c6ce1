# Written by `make stubs` from the table of the package.
from pipeflow.megatron.schedules import finalize_model_grads

__all__ = ["finalize_model_grads"]
