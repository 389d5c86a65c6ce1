# Written by `make stubs` from the table of the package.
from pipeflow.colossalai.optimizers import AMP_TYPE

__all__ = ["AMP_TYPE"]
