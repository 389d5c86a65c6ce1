"""Factors: by how much one set of sketches is a multiple of another, and what in a job has such a size."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from pipeflow.checking.files import Array
from pipeflow.checking.two_runs import TwoRuns

NEAR = 0.02  # relative: what a factor may be off, when it is named


class Fit(NamedTuple):
    """`values` is nearly `factor` times `others`; `error` is what is left, relative to `values`."""

    factor: float
    error: float


def fit(others: Array, values: Array) -> Fit:
    """The factor by which sketches, of any shape, are a multiple of others."""
    size = float(np.sum(others * others))
    factor = float(np.sum(others * values)) / size if size else 0.0
    left = float(np.sqrt(np.sum(np.square(values - factor * others))))
    return Fit(factor, left / max(float(np.sqrt(np.sum(np.square(values)))), 1e-300))


def counts(both: TwoRuns, step: int) -> dict[str, float]:
    """What the jobs count, by name: things by which a gradient may be multiplied by mistake."""
    candidate, reference = both.candidate, both.reference
    found: dict[str, float] = {}
    for name, events in both.outputs(candidate, step).items():
        calls: defaultdict[int, int] = defaultdict(int)
        for rank, _ in events:
            calls[rank] += 1
        found.setdefault("microbatches of a rank", max(calls.values()))
        mine = len(both.outputs(reference, step).get(name, ()))
        found.setdefault("microbatches of the plain run", mine)
    groups = {size: name for name, size in candidate.sizes.items() if size > 1}
    found |= {f"ranks of the group {name}": size for size, name in groups.items()}
    found["ranks"] = candidate.world
    parts = {whole.kinds for whole in both.candidate_wholes(step, "after").values()}
    found |= {f"ranks that share a tensor ({count})": count for count in parts}
    copies = {len(whole.copies) // max(1, whole.kinds) for whole in both.candidate_wholes(step, "after").values()}
    found |= {f"replicas ({count})": count for count in copies}
    tokens = sum(float(event["valid"].reshape(-1)[0]) for _, event in reference.events(step, "labels"))
    found |= {"valid tokens": tokens}
    for _, event in reference.events(step, "batch"):
        found["samples"] = float(
            sum(each["shape"][0] for _, each in reference.events(step, "batch") if each["place"] == event["place"])
        )
    return {name: size for name, size in found.items() if size > 1}


def named(factor: float, sizes: Mapping[str, float]) -> str | None:
    """The count, or product of two, that a factor equals, or one over it; None if there is none."""
    for name, size in _candidates(sizes):
        for value, words in ((size, f"the number of {name}"), (1.0 / size, f"one over the number of {name}")):
            if abs(factor / value - 1.0) < NEAR:
                return words
    return None


def _candidates(sizes: Mapping[str, float]) -> Iterator[tuple[str, float]]:
    yield from sizes.items()
    listed = [*sizes.items()]
    for index, (name, size) in enumerate(listed):
        yield from ((f"{name} times that of {other}", size * more) for other, more in listed[index:] if "(" not in name)


def root_named(factor: float, sizes: Mapping[str, float]) -> str | None:
    """As `named`, for the square of the factor: what a norm that counts something several times is off by."""
    found = named(factor * factor, sizes)
    return None if found is None else f"the root of {found}"


def spread_of(values: Sequence[float]) -> float:
    """The largest relative distance of numbers from their mean."""
    mean = sum(values) / len(values)
    return max(abs(value - mean) for value in values) / max(abs(mean), 1e-300)


def told(factor: float) -> str:
    """A factor in words.

    >>> told(4.0), told(0.25)
    ('4 times', '0.25 times')
    """
    return f"{factor:.4g} times"
