"""ColossalAI's `colossalai.pipeline`."""

from __future__ import annotations
