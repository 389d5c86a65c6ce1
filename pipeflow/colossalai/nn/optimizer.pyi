# Written by `make stubs` from the table of the package.
from pipeflow.colossalai.layers import HybridAdam
from pipeflow.training.optim import Lamb

__all__ = ["HybridAdam", "Lamb"]
