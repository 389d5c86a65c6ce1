# Written by `make stubs` from the table of the package.
from pipeflow.megatron.config import DistributedDataParallel, DistributedDataParallelConfig

__all__ = ["DistributedDataParallel", "DistributedDataParallelConfig"]
