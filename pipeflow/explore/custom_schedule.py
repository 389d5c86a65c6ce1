"""Custom: what there is to say about the schedule that a reader builds: what is wrong with it, what it lacks, which
named schedule it is, and how far it is from the best. Must not contain: how it is drawn.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pipeflow.core.schedule import Schedule
from pipeflow.core.violation import Violation
from pipeflow.explore.fields import CUSTOM
from pipeflow.explore.proved_bound import par
from pipeflow.explore.schedule_cache import drafted, schedule
from pipeflow.explore.state import State
from pipeflow.schedules.registry_names import recognised
from pipeflow.soundness.cycles import Place
from pipeflow.soundness.missing_actions import missing
from pipeflow.soundness.schedule import verify
from pipeflow.soundness.sentences import sentence_of_wait
from pipeflow.soundness.waits import Wait, waits


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
    made, drawn = schedule(state, CUSTOM), drafted(state)
    why = waits(made, drawn.stuck)
    wrong = verify(made, memory_cap=state.memory_cap)
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
