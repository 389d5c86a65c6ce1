"""ColossalAI's `colossalai.booster`."""

from __future__ import annotations

from pipeflow.colossalai.booster.booster import Booster

__all__ = ["Booster"]
