"""ColossalAI's `colossalai.trainer`."""

from __future__ import annotations

from pipeflow.colossalai.trainer import hooks
from pipeflow.colossalai.trainer.training import Trainer

__all__ = ["Trainer", "hooks"]
