"""ParallelMode: which ranks a question of the global context is about."""

from __future__ import annotations

from enum import Enum


class ParallelMode(Enum):
    """Which ranks of the world are meant, seen from one of them."""

    GLOBAL = "all"
    DATA = "those that hold the same weights for other data"
    PIPELINE = "those of one pipeline"
    TENSOR = "those that hold the other parts of the same layers"
    PARALLEL_1D = TENSOR
    MODEL = "those that hold one replica of the model together: tensor times pipeline"
