"""Depth: numbers along the depth of a model, for any number of stages."""

from __future__ import annotations

import math
from collections.abc import Sequence


def mean(numbers: Sequence[float], stage: int, stages: int) -> float:
    """The mean of the numbers of equal parts of a model over the part that a stage is.

    >>> [mean((1, 3), stage, 4) for stage in range(4)]
    [1.0, 1.0, 3.0, 3.0]
    """
    first, last = stage * len(numbers) / stages, (stage + 1) * len(numbers) / stages
    parts = [
        (min(last, index + 1) - max(first, index)) * numbers[index]
        for index in range(math.floor(first), min(math.ceil(last), len(numbers)))
    ]
    return sum(parts) / (last - first)


def spread(numbers: Sequence[float], stages: int) -> tuple[float, ...]:
    """Numbers per stage, divided among another number of stages by their depth; the sum stays.

    >>> spread((2, 6), 4), spread((1, 1, 3, 3), 2)
    ((1.0, 1.0, 3.0, 3.0), (2.0, 6.0))
    """
    if len(numbers) in (0, stages):
        return tuple(numbers)
    return tuple(mean(numbers, stage, stages) * len(numbers) / stages for stage in range(stages))
