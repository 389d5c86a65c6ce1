# Written by `make stubs` from the table of the package.
from pipeflow.megatron.dist_checkpointing import load, save

__all__ = ["load", "save"]
