"""ColossalAI's `colossalai.context`."""

from __future__ import annotations

from pipeflow.colossalai.context.parallel_mode import ParallelMode
from pipeflow.training.config import Config

__all__ = ["Config", "ParallelMode"]
