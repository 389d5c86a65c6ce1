# Written by `make stubs` from the table of the package.
from pipeflow.megatron.gpt_model import load, save

__all__ = ["load", "save"]
