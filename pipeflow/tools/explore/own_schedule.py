"""What there is to say about the schedule that a reader builds: what is wrong with it, what it lacks, which named
schedule it is, and how far it is from the proved lower bound. Must not contain: how it is drawn, and the proof, which
is in `orders`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

from pipeflow.core.action import Kind
from pipeflow.core.cost import CostModel, pairing_of
from pipeflow.core.errors import UsageError, Violation
from pipeflow.core.liveness import MemoryCap
from pipeflow.core.placement import Placement
from pipeflow.core.schedule import Schedule
from pipeflow.core.soundness.deadlock_search import Place, Wait, sentence_of_wait, waits
from pipeflow.core.soundness.verification import missing, verify
from pipeflow.core.text import percent
from pipeflow.schedules.orders.lower_bounds import bounds
from pipeflow.schedules.orders.problem import make_problem
from pipeflow.schedules.orders.spilling import MemoryKind
from pipeflow.schedules.registry import recognised
from pipeflow.tools.explore.fields import CUSTOM
from pipeflow.tools.explore.state import State

LARGEST = 16_384  # stages times microbatches, so that the bound takes no second


def par(state: State, made: Schedule, makespan: float | None) -> dict[str, Any]:
    """`bound`: the bound of `made` and its gap to it, for a sound schedule whose makespan is known; None if there is no
    bound. `bound_text`: why there is none, else what it says.
    """
    cost, unit = state.prices.cost_model(made.placement), state.unit
    caps = (None, None) if saving(made) else (state.options.get("memory_cap"), state.options.get("bytes_cap"))
    if pairing_of(cost).hides and made.has_pairs:
        return _none("no lower bound is known for pairs that overlap")
    if makespan is not None and made.is_forward_only:
        return _none("the lower bound is that of a step with backwards")
    if made.placement.num_stages * made.num_microbatches * made.slices > LARGEST:
        return _none(f"the lower bound is computed up to {LARGEST:,} stages times microbatches (times their slices)")
    try:
        least = _least(made.placement, made.num_microbatches, cost, *caps, made.slices)
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
    placement: Placement,
    microbatches: int,
    cost: CostModel,
    memory_cap: MemoryCap | None,
    bytes_cap: MemoryCap | None,
    slices: int,
) -> float:
    return bounds(make_problem(placement, microbatches, cost, memory_cap, bytes_cap, slices=slices)).objective


def custom(state: State) -> dict[str, Any]:
    """The facts about the reader's own schedule, as JSON values:

    - entries: per rank, the texts of its row.
    - places: per rank and block of the drawing, the index of its entry.
    - stuck: per rank, the index of the first block that cannot run; None if all run. What cannot run is drawn behind
      everything else, in the order of its row.
    - waits: for each of these ranks, its place, and as a sentence why it cannot go on; what it needs, and who makes it.
    - sound, violations: the result of `verify`, under the memory cap if there is one, each with a sentence.
    - missing: the actions that it lacks.
    - cycle: the places of a deadlock, each of which would have to come before the next, and the last before the first.
    - same_as: the named schedules that have the same rows.
    - bound, bound_text: the lower bound for its placement, costs and cap; or None, and why there is none.

    Raises UsageError for rows that cannot be read, and for a memory cap that fits no ranks.
    """
    made, drawn = state.schedule(CUSTOM), state.draft()
    why = waits(made, drawn.stuck)
    wrong = verify(made, memory_cap=state.options.get("memory_cap"))
    cycle = next((each.cycle for each in wrong if each.cycle), ())
    waiting = {(each.rank, each.position): each for each in why}
    return {
        "entries": [[str(entry) for entry in row] for row in made.rows],
        "places": drawn.places,
        "stuck": [drawn.first_stuck(rank) for rank in range(len(made.rows))],
        "waits": [_said(made, each.rank, each.position, sentence_of_wait(made, each, waiting), each) for each in why],
        "sound": not wrong,
        "violations": [*_violations(made, wrong, waiting)],
        "missing": [{"rank": rank, "text": str(action)} for rank, action in missing(made)],
        "cycle": [_entry(made, place) for place in cycle],
        "same_as": recognised(made),
        **par(state, made, None if wrong else drawn.timeline.makespan),
    }


def _violations(made: Schedule, wrong: list[Violation], waiting: Mapping[Place, Wait]) -> Iterator[dict[str, Any]]:
    for each in wrong:
        wait = waiting.get(each.cycle[0]) if each.cycle else None
        if wait is not None and wait.maker is None:  # it waits for something else that is missing
            wait = None
        yield _said(made, each.rank, each.position, each.sentence, wait)


def _said(
    made: Schedule, rank: int | None, position: int | None, sentence: str, wait: Wait | None = None
) -> dict[str, Any]:
    """A sentence about a place, with what is needed there."""
    return {
        "rank": rank,
        "position": position,
        "sentence": sentence,
        "needs": None if wait is None or wait.value is None else str(wait.value),
        "maker": None if wait is None or wait.maker is None else _entry(made, wait.maker),
    }


def _entry(made: Schedule, place: Place) -> dict[str, Any]:
    rank, position = place
    return {"rank": rank, "position": position, "text": str(made.rows[rank][position])}
