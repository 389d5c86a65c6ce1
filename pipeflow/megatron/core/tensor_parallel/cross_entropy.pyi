# Written by `make stubs` from the table of the package.
from pipeflow.megatron.tensor_parallel import vocab_parallel_cross_entropy

__all__ = ["vocab_parallel_cross_entropy"]
