"""ParallelMode: a set of ranks that methods of the global context refer to."""

from __future__ import annotations

from enum import Enum


class ParallelMode(Enum):
    """A set of ranks of the world, seen from one of them."""

    GLOBAL = "all"
    DATA = "those that hold the same weights for other data"
    PIPELINE = "those of one pipeline"
    TENSOR = "those that hold the other parts of the same layers"
    PARALLEL_1D = TENSOR
    MODEL = "those that hold one replica of the model together: tensor times pipeline"
