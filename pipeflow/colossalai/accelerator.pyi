# Written by `make stubs` from the table of the package.
from pipeflow.colossalai.global_context import get_accelerator

__all__ = ["get_accelerator"]
