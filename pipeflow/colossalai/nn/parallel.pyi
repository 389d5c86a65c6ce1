# Written by `make stubs` from the table of the package.
from pipeflow.colossalai.gemini import GeminiDDP

__all__ = ["GeminiDDP"]
