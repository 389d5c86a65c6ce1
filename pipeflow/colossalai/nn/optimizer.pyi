# Written by `make stubs` from the table of the package.
from pipeflow.colossalai.optimizers import HybridAdam
from pipeflow.optim import Lamb

__all__ = ["HybridAdam", "Lamb"]
