# Written by `make stubs` from the table of the package.
from pipeflow.megatron.datasets import compile_helpers

__all__ = ["compile_helpers"]
