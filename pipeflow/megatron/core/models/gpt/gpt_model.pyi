# Written by `make stubs` from the table of the package.
from pipeflow.megatron.gpt_model import GPTModel

__all__ = ["GPTModel"]
