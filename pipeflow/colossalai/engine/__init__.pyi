# Written by `make stubs` from the table of the package.
from pipeflow.colossalai.engines import Engine

__all__ = ["Engine"]
