"""ColossalAI's `colossalai.nn.optimizer`."""

from __future__ import annotations

from pipeflow.optim.lamb import Lamb

__all__ = ["Lamb"]
