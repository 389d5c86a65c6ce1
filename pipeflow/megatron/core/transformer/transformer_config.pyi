# Written by `make stubs` from the table of the package.
from pipeflow.megatron.tensor_parallel import TransformerConfig

__all__ = ["TransformerConfig"]
