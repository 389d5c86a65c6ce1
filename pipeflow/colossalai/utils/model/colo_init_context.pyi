# Written by `make stubs` from the table of the package.
from pipeflow.colossalai.gemini import ColoInitContext

__all__ = ["ColoInitContext"]
