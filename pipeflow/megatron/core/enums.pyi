# Written by `make stubs` from the table of the package.
from pipeflow.megatron.config import ModelType

__all__ = ["ModelType"]
