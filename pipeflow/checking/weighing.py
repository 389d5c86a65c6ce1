"""Weighing samples: how often each sample of the reference counts in a gradient of the candidate."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pipeflow.checking.files import Array
from pipeflow.checking.findings import Cause
from pipeflow.checking.runs import norm

CLEAR = 0.03  # relative: what may be left of a gradient that is explained
EXPLAINED = 0.25  # of what differs: what may be left of it


def weights_of(rows: Array, values: Array) -> list[float] | None:
    """How often each sample counts in a gradient: w with rows w = values. Neighbours are taken together if there are
    more samples than numbers. None if no w explains the gradient.
    """
    many = rows.shape[1]
    for group in (size for size in (1, 2, 4, 8, 16, 32, 64, 128) if many % size == 0):
        added = rows.reshape(len(rows), many // group, group).sum(axis=2)
        if added.shape[1] * 1.3 > len(rows) and added.shape[1] > 1:
            continue
        found, *_ = np.linalg.lstsq(added, values, rcond=1e-6)
        left = norm(values - added @ found)
        if left < CLEAR * norm(values) and left <= EXPLAINED * norm(values - rows.sum(axis=1)):
            return [float(weight) for weight in np.repeat(found, group)]
    return None


def cause_of(weights: Sequence[float], name: str) -> Cause | None:
    """The cause of samples that count this often in a gradient; None if all count alike."""
    base = float(np.median([weight for weight in weights if weight > 0.1] or [1.0]))
    shares = [weight / base for weight in weights]
    none = [index for index, share in enumerate(shares) if abs(share) < 0.05]
    twice = [index for index, share in enumerate(shares) if abs(share - 2.0) < 0.05]
    ones = sum(abs(share - 1.0) < 0.05 for share in shares)
    look = "which microbatches the schedule runs, and where gradients are added up"
    if none and len(none) + ones == len(shares):
        return Cause(
            "missing_microbatch",
            f"samples {listed(none)} add nothing to the gradients, from {name} on",
            look,
            None,
        )
    if twice and len(twice) + ones == len(shares):
        return Cause(
            "missing_microbatch",
            f"samples {listed(twice)} count twice in the gradients, from {name} on",
            look,
            2.0,
        )
    low, high = min(shares), max(shares)
    if high - low < 0.03:
        return None
    return Cause(
        "masked_tokens",
        f"samples count differently in the gradients: {low * base:.3g} to {high * base:.3g} times as in the reference",
        "whether the mean over tokens is that of the whole batch, or one of each microbatch, replica or sequence",
    )


def listed(indices: Sequence[int]) -> str:
    """Indices in words.

    >>> listed([2, 3, 4]), listed([1, 5])
    ('2 to 4', '1, 5')
    """
    if len(indices) > 2 and indices[-1] - indices[0] == len(indices) - 1:
        return f"{indices[0]} to {indices[-1]}"
    return ", ".join(map(str, indices[:8])) + (" ..." if len(indices) > 8 else "")
