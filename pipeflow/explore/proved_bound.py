"""Par: the proved lower bound for a schedule that a reader builds, and how far it is from it. Must not contain: the
proof, which is in `orders`.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from pipeflow.analysis.memory_cap import MemoryCap
from pipeflow.core.action import Kind, Pair
from pipeflow.core.cost import CostModel
from pipeflow.core.errors import UsageError
from pipeflow.core.placement import Placement
from pipeflow.core.schedule import Schedule
from pipeflow.core.text import percent
from pipeflow.explore.state import State
from pipeflow.orders.lower_bounds import bounds
from pipeflow.orders.memory.storage import MemoryKind
from pipeflow.orders.problem import make_problem

LARGEST = 16_384  # stages times microbatches, so that the bound takes no second


def par(state: State, made: Schedule, makespan: float | None) -> dict[str, Any]:
    """`bound`: the bound of `made` and its gap to it, for a sound schedule whose makespan is known; None if there is no
    bound. `bound_text`: why there is none, else what it says.
    """
    cost, unit = state.cost_model(made.placement), state.unit
    caps = (None, None) if saving(made) else (state.memory_cap, state.options.get("bytes_cap"))
    if cost.overlap and any(isinstance(entry, Pair) for row in made.rows for entry in row):
        return _none("no lower bound is known for pairs that overlap")
    if makespan is not None and made.is_forward_only:
        return _none("the lower bound is that of a step with backwards")
    if made.placement.num_stages * made.num_microbatches > LARGEST:
        return _none(f"the lower bound is computed up to {LARGEST:,} stages times microbatches")
    try:
        least = _least(made.placement, made.num_microbatches, cost, *caps)
    except UsageError as error:
        return _none(f"there is no lower bound: {error}")
    text = f"no order of this placement can end before {unit.text(least)}"
    gap = None
    if makespan is not None:
        gap = makespan / least - 1 if least else 0.0
        best = gap < 1e-9
        text += "; this one is proved best" if best else f"; this one takes {percent(gap)} longer"
    return {"bound": {"makespan": least, "gap": gap, "text": text}, "bound_text": text}


def saving(made: Schedule) -> tuple[MemoryKind, ...]:
    """The ways to save memory that a schedule uses: with them, a cap bounds no order."""
    ways: tuple[tuple[MemoryKind, Kind], ...] = (("offload", Kind.O), ("recompute", Kind.C))
    return tuple(way for way, kind in ways if kind in made.kinds)


def _none(why: str) -> dict[str, Any]:
    return {"bound": None, "bound_text": why}


@lru_cache(64)
def _least(
    placement: Placement, microbatches: int, cost: CostModel, memory_cap: MemoryCap | None, bytes_cap: MemoryCap | None
) -> float:
    return bounds(make_problem(placement, microbatches, cost, memory_cap, bytes_cap)).objective
