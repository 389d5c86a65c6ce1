"""ColossalAI's `colossalai.amp`."""

from __future__ import annotations

from pipeflow.optim.precision import AMP_TYPE

__all__ = ["AMP_TYPE"]
