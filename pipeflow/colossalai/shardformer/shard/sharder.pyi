# Written by `make stubs` from the table of the package.
from pipeflow.colossalai.sharders import ModelSharder

__all__ = ["ModelSharder"]
