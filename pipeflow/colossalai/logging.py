"""ColossalAI's `colossalai.logging`."""

from __future__ import annotations

from pipeflow.training.logging import DistributedLogger, disable_existing_loggers, get_dist_logger

__all__ = ["DistributedLogger", "disable_existing_loggers", "get_dist_logger"]
