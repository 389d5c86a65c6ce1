# Written by `make stubs` from the table of the package.
from pipeflow.colossalai.processes import get_accelerator

__all__ = ["get_accelerator"]
