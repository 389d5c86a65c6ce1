# Written by `make stubs` from the table of the package.
from pipeflow.colossalai.layers import Accuracy

__all__ = ["Accuracy"]
