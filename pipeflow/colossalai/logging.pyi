# Written by `make stubs` from the table of the package.
from pipeflow.training import DistributedLogger, disable_existing_loggers, get_dist_logger

__all__ = ["DistributedLogger", "disable_existing_loggers", "get_dist_logger"]
