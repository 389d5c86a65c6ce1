"""The fit of the planner's coefficients: least squares of the logarithms of predicted over measured times, beside what
is known of each coefficient beforehand.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from functools import partial

import numpy as np
import numpy.typing as npt

from benchmarks.measured_steps import Row
from pipeflow.planning.efficiency import Efficiency

Array = npt.NDArray[np.float64]

EXPECTED: dict[str, tuple[float, float]] = {  # and by which factor it may well differ, as a standard deviation
    "products": (0.85, 1.04),
    "depth": (150, 1.5),
    "rows": (150, 1.5),
    "attention": (0.4, 1.35),
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
}
WEIGHT = {"vtrain-single": 4.0, "vtrain-multi": 20.0, "2205.05198-tab5": 50.0}  # of a row, as sources differ in rows
STRENGTH = 3.0  # of what is expected, beside the rows
EVERY = 4  # so many rows of a large source there are for one that is fitted on
ROBUST = 0.1  # beyond this error a row counts less than its square
STEP = 0.02  # of a coefficient's logarithm, to find slopes


def fitted(rows: Sequence[Row], start: Efficiency | None = None, *, turns: int = 8) -> Efficiency:
    """The coefficients for these rows, by the method of Gauss and Newton."""
    names = list(EXPECTED)  # the others have no value of their own here
    centre = np.log([EXPECTED[name][0] for name in names])
    spread = np.log([EXPECTED[name][1] for name in names])
    chosen = _chosen(rows)
    weights = np.sqrt([WEIGHT[row.source] for row in chosen])

    def residuals(point: Array) -> Array:
        known = dict(zip(names, np.exp(point), strict=True))
        errors = np.array([math.log(row.estimated(known) / row.seconds) for row in chosen])
        robust = np.sign(errors) * np.sqrt(2 * (np.sqrt(1 + (errors / ROBUST) ** 2) - 1))
        return np.concatenate([weights * robust, STRENGTH * (point - centre) / spread])

    point = centre if start is None else np.log([max(asdict(start)[name], 1e-12) for name in names])
    found = residuals(point)
    for _ in range(turns):
        slopes = np.stack([(residuals(point + STEP * axis) - found) / STEP for axis in np.eye(len(names))], axis=1)
        move = -np.linalg.lstsq(slopes, found, rcond=None)[0]
        size = 1.0
        while size > 0.1:  # a shorter step where the whole one does not help
            tried = residuals(point + size * move)
            if tried @ tried < found @ found:
                break
            size /= 2
        else:
            break
        before, after = float(found @ found), float(tried @ tried)
        point, found = point + size * move, tried
        if before - after < 1e-3 * before:
            break
    return Efficiency(**dict(zip(names, map(float, np.exp(point)), strict=True)))


def _chosen(rows: Sequence[Row]) -> list[Row]:
    """All rows of small sources, one of EVERY of the others."""
    sources = [row.source for row in rows]
    return [row for index, row in enumerate(rows) if sources.count(row.source) < 100 or index % EVERY == 0]


def fitted_each(parts: Sequence[Sequence[Row]], start: Efficiency) -> list[Efficiency]:
    """`fitted` of each part, in as many processes as there are cores."""
    with ProcessPoolExecutor() as pool:
        return list(pool.map(partial(fitted, start=start, turns=4), parts))
