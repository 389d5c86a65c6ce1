"""The fit of the planner's coefficients: least squares of the logarithms of predicted over measured times, beside what
is known of each coefficient beforehand.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict

import numpy as np
import numpy.typing as npt

from benchmarks.measured_steps import Row
from pipeflow.planning.efficiency import PUBLISHED, REACHES

Array = npt.NDArray[np.float64]

EXPECTED: dict[str, tuple[float, float]] = {  # and by which factor it may well differ, as a standard deviation
    "products": (0.85, 1.04),
    "depth": (150, 1.5),
    "rows": (150, 1.5),
    "fused": (1.0, 1.1),
    "memory": (0.75, 1.16),
    "forward_launch": (1e-3, 1.8),
    "backward_launch": (1e-3, 1.8),
    "sync": (15e-6, 1.65),
    "link": (0.7, 1.2),
    "network": (0.9, 1.1),  # nccl-tests on 3 nodes of A100 with 4 x 200 Gbit/s: 0.96 at best (NVIDIA/nccl-tests #119)
    "reduction": (0.5, 1.35),
    "collective": (50e-6, 1.65),
    "transfer": (0.3, 1.65),
    "transfer_start": (200e-6, 1.65),
    "contention": (3.0, 1.3),
    "h100 bf16": (0.92, 1.05),  # the maximum achievable FLOP/s of ml-engineering, relative to those of A100
    "h100 fp8": (0.82, 1.1),
    "b200 bf16": (0.83, 1.3),
    "b200 fp8": (0.82, 1.3),
}
FEW = 20  # rows of a source that count in full; of one with more, all together count as this many
STRENGTH = 3.0  # of what is expected, beside the rows
WEIGHT = 20.0  # of a row in full
MOST = 60  # rows of a source that are fitted on
ROBUST = 0.1  # beyond this error a row counts less than its square
FAR = 0.5  # of a coefficient's logarithm, beyond which errors are not linear
TURNS = 8
STEP = 0.02  # of a coefficient's logarithm, to find slopes
JUDGED = {  # and not fitted on
    *("dgxc-moe", "megatron-readme", "nemo-long-b200", "fms-fsdp"),  # a part of the layout was not published
    "dgxc-grok",  # experts one by one, without grouped products: what surrounds them is not planned
    *("internevo", "internevo-ac"),  # a program that is slower than all others on the device, in every layout
}
NAMES = tuple(EXPECTED)  # the others have no value of their own here
CENTRE = np.log([EXPECTED[name][0] for name in NAMES])
SPREAD = np.log([EXPECTED[name][1] for name in NAMES])


def fitted(rows: Sequence[Row]) -> dict[str, float]:
    """The coefficients for these rows, by name."""
    chosen = thinned(rows)
    return _named(_least(chosen, Near.of(chosen, point_of(own_coefficients()))))


def _least(chosen: Sequence[Row], near: Near, turns: int = TURNS) -> Array:
    """Where the sum of squares over these rows is least, from a point near which their errors are known, with the
    method of Gauss and Newton. A turn that would make it larger goes half as far, and so on: where launches begin to
    take longer than computations, slopes change.
    """
    for turn in range(turns):
        near = near if turn == 0 else Near.of(chosen, near.point)
        step = near.solved() - near.point
        while np.abs(step).max() > STEP / 4:
            there = near.at(near.point + step, errors_at(chosen, near.point + step))
            if there.cost < near.cost:
                break
            step /= 2
        else:
            break
        near = there
    return near.point


def fitted_without(
    rows: Sequence[Row], start: Mapping[str, float], parts: Sequence[Callable[[Row], bool]]
) -> list[dict[str, float]]:
    """The coefficients without the rows of each part, from the slopes at `start`, where those of all rows lie. Where
    they move far from there, slopes change, and there are further turns.
    """
    chosen = thinned(rows)
    near = Near.of(chosen, point_of(start))
    found = []
    for part in parts:
        used = [not part(row) for row in chosen]
        point = near.solved(used)
        if np.abs(point - near.point).max() > FAR:
            point = _least([row for row in chosen if not part(row)], near.of_some(used))
        found.append(_named(point))
    return found


def thinned(rows: Sequence[Row]) -> list[Row]:
    """All rows of small sources, some of the others."""
    found: list[Row] = []
    for source in dict.fromkeys(row.source for row in rows if row.source not in JUDGED):
        own = [row for row in rows if row.source == source]
        found += own[:: -(-len(own) // MOST)]
    return found


class Near:
    """Errors of rows near a point, as linear functions of the logarithms of coefficients."""

    def __init__(self, sources: Sequence[str], point: Array, errors: Array, slopes: Array) -> None:
        self.sources, self.point, self.errors, self.slopes = np.array(sources), point, errors, slopes

    @classmethod
    def of(cls, rows: Sequence[Row], point: Array) -> Near:
        """Of these rows, as the planner predicts them."""
        errors = errors_at(rows, point)
        axes = STEP * np.eye(len(NAMES))
        slopes = np.stack([(errors_at(rows, point + axis) - errors) / STEP for axis in axes], axis=1)
        return cls([row.source for row in rows], point, errors, slopes)

    def of_some(self, used: Sequence[bool]) -> Near:
        """Of some of the rows."""
        chosen = np.array(used)
        return Near(list(self.sources[chosen]), self.point, self.errors[chosen], self.slopes[chosen])

    def at(self, point: Array, errors: Array) -> Near:
        """The same elsewhere, where rows have these errors."""
        return Near(list(self.sources), point, errors, self.slopes)

    @property
    def cost(self) -> float:
        """The sum of squares that `solved` makes small, at the point itself."""
        weights = self._weights(np.ones(len(self.errors), dtype=bool))
        beside = STRENGTH * (CENTRE - self.point) / SPREAD
        return float(2 * weights @ (np.hypot(1, self.errors / ROBUST) - 1) + beside @ beside)

    def solved(self, used: Sequence[bool] | None = None) -> Array:
        """The point with the least squares over the rows that are used. Large errors count less, again and again."""
        chosen = np.ones(len(self.errors), dtype=bool) if used is None else np.array(used)
        weights = self._weights(chosen)
        move = np.zeros(len(NAMES))
        for _ in range(30):
            errors = self.errors + self.slopes @ move
            scale = np.sqrt(weights / np.sqrt(1 + (errors / ROBUST) ** 2)) / ROBUST
            left = np.concatenate([scale[:, None] * self.slopes, np.diag(STRENGTH / SPREAD)])
            right = np.concatenate([-scale * self.errors, STRENGTH * (CENTRE - self.point) / SPREAD])
            move = np.linalg.lstsq(left, right, rcond=None)[0]
        return self.point + move

    def _weights(self, chosen: Array) -> Array:
        counts = {source: float((self.sources[chosen] == source).sum()) for source in set(self.sources[chosen])}
        found = [WEIGHT * min(1.0, FEW / counts[source]) if source in counts else 0.0 for source in self.sources]
        return np.where(chosen, found, 0.0)


def own_coefficients() -> dict[str, float]:
    """The planner's own coefficients, with those of devices as `measured_steps.coefficients` names them."""
    devices = {f"{like} {each}": share["products"] for like, known in REACHES.items() for each, share in known.items()}
    return {name: (asdict(PUBLISHED) | devices)[name] for name in NAMES}


def point_of(known: Mapping[str, float]) -> Array:
    """The logarithms of coefficients."""
    return np.log([max(known[name], 1e-12) for name in NAMES])


def _named(point: Array) -> dict[str, float]:
    return dict(zip(NAMES, map(float, np.exp(point)), strict=True))


def errors_at(rows: Sequence[Row], point: Array) -> Array:
    """The errors of rows at a point, as logarithms of ratios."""
    known = _named(point)
    return np.array([math.log(row.estimated(known) / row.seconds) for row in rows])
