# Written by `make stubs` from the table of the package.
from pipeflow.megatron.schedules import forward_backward_no_pipelining, forward_backward_pipelining_with_interleaving, forward_backward_pipelining_without_interleaving, get_forward_backward_func

__all__ = ["forward_backward_no_pipelining", "forward_backward_pipelining_with_interleaving", "forward_backward_pipelining_without_interleaving", "get_forward_backward_func"]
