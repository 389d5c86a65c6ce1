"""Search: a better order for the schedule that is shown, on the same placement, for the same costs and memory cap."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipeflow.analysis.simulation import simulate
from pipeflow.core.errors import UsageError
from pipeflow.core.schedule import Schedule
from pipeflow.core.text import percent
from pipeflow.explore.fields import CUSTOM
from pipeflow.explore.proved_bound import saving
from pipeflow.explore.rows import custom_fields
from pipeflow.explore.schedule_cache import completed, schedule
from pipeflow.explore.state import State
from pipeflow.orders.optimizer_steps import without_optimizer_step
from pipeflow.schedules.order_search import search as searched
from pipeflow.soundness.schedule import verify

BUDGET = 2.0  # seconds
LARGEST = 2048  # stages times microbatches, so that a search can try some orders


def search(fields: Mapping[str, str]) -> dict[str, Any]:
    """A better order than that of the schedule of a state:

    - fields: what to set in the link to see it; None if nothing better was found.
    - makespan, bound, gap: those of the best order; without a better one, of the one that is shown.
    - before: the makespan of the one that is shown; None if the search could not begin with it.
    - text: what came of it, in a sentence or two.

    The search splits backwards into halves, runs pairs one action after the other, and saves memory in the ways that
    the schedule does.

    Raises UsageError for fields that are wrong, for several schedules, and for what no search takes: placements in two
    directions, more than `LARGEST` stages times microbatches, and a memory cap that no order keeps.
    """
    state = State.of(fields)
    if len(state.schedules) > 1:
        raise UsageError("choose one schedule to search from")
    made = schedule(state, state.schedules[0])
    placement, cost = made.placement, state.cost_model(made.placement)
    if len(placement.paths) > 1:
        raise UsageError("a search takes placements in one direction: begin with a schedule like 1f1b or zb-v")
    if placement.num_stages * made.num_microbatches > LARGEST:
        raise UsageError(f"a search takes up to {LARGEST:,} stages times microbatches: use fewer microbatches")
    wrong = _wrong(state, made)
    found = searched(
        placement,
        made.num_microbatches,
        cost,
        memory_cap=state.memory_cap,
        bytes_cap=state.bytes_cap,
        kinds=saving(made),
        budget=BUDGET,
        start=[] if wrong else [without_optimizer_step(made.without_reductions())],
        name=CUSTOM,
    )
    best = completed(state, found.schedule)
    makespan = simulate(best, cost).makespan
    before = None if wrong else simulate(made, cost).makespan
    if before is not None and makespan >= before * (1 - 1e-9):
        best, makespan = made, before
        said = f"no better order was found in {BUDGET:g} seconds"
    else:
        was = f"begun anew, since the present order {wrong}" if before is None else f"before: {state.unit.text(before)}"
        said = f"an order that ends at {state.unit.text(makespan)} ({was})"
    gap = makespan / found.lower_bound - 1 if found.lower_bound else 0.0
    return {
        "fields": None if best is made else custom_fields(best),
        "makespan": makespan,
        "before": before,
        "bound": found.lower_bound,
        "gap": gap,
        "text": f"{said}; {_proved(gap, state.unit.text(found.lower_bound))}",
    }


def _wrong(state: State, made: Schedule) -> str:
    """Why a search cannot begin with a schedule; empty if it can."""
    if verify(made):
        return "is unsound"
    if made.is_forward_only:
        return "has no backwards"
    return "keeps more than the memory cap" if verify(made, memory_cap=state.memory_cap) else ""


def _proved(gap: float, bound: str) -> str:
    return "it is proved best" if gap < 1e-9 else f"it is {percent(gap)} above the proved lower bound of {bound}"
