# Written by `make stubs` from the table of the package.
from pipeflow.colossalai.boosters import Booster

__all__ = ["Booster"]
