# Written by `make stubs` from the table of the package.
from pipeflow.colossalai.processes import get_current_device, is_using_pp
from pipeflow.training import MultiTimer, get_dataloader

__all__ = ["MultiTimer", "get_current_device", "get_dataloader", "is_using_pp"]
