# Written by `make stubs` from the table of the package.
from pipeflow.megatron.schedules import DistributedDataParallel, DistributedDataParallelConfig

__all__ = ["DistributedDataParallel", "DistributedDataParallelConfig"]
