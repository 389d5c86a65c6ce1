# Written by `make stubs` from the table of the package.
from pipeflow.training import MultiTimer, Timer

__all__ = ["MultiTimer", "Timer"]
