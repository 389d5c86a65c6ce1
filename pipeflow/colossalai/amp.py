"""ColossalAI's `colossalai.amp`."""

from __future__ import annotations

from enum import StrEnum


class AMP_TYPE(StrEnum):  # noqa: N801  # its name in every tutorial
    """Ways to train a model in 16 bits; each is a mode of HalfPrecision."""

    NAIVE = "parameters"
    TORCH = "autocast"
    APEX = "apex"  # NVIDIA's, not supported
