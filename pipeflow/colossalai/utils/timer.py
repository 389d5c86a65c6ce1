"""ColossalAI's `colossalai.utils.timer`."""

from __future__ import annotations

from pipeflow.training.timer import MultiTimer, Timer

__all__ = ["MultiTimer", "Timer"]
