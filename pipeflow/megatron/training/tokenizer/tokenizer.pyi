# Written by `make stubs` from the table of the package.
from pipeflow.megatron.datasets import _NullTokenizer as _NullTokenizer

__all__ = []
