# Written by `make stubs` from the table of the package.
from pipeflow.megatron.schedules import get_forward_backward_func

__all__ = ["get_forward_backward_func"]
