# Written by `make stubs` from the table of the package.
from pipeflow.megatron.data_parallel import DistributedDataParallel, DistributedDataParallelConfig

__all__ = ["DistributedDataParallel", "DistributedDataParallelConfig"]
