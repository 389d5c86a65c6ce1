# Written by `make stubs` from the table of the package.
from pipeflow.colossalai.layers import AMP_TYPE

__all__ = ["AMP_TYPE"]
