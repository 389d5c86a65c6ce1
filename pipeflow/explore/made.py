"""Made: the schedules and timelines that a state asks for; those that were asked for last are kept."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from pipeflow.analysis.simulate import simulate
from pipeflow.core.cost import CostModel
from pipeflow.core.errors import UsageError
from pipeflow.core.schedule import Schedule
from pipeflow.core.timeline import Timeline
from pipeflow.explore.fields import CUSTOM
from pipeflow.explore.state import State
from pipeflow.schedules import make_schedule, options_of

KEPT = 128  # schedules, and as many timelines


def schedule(state: State, name: str) -> Schedule:
    """The schedule `name` in the size of `state`, with the options that it has. Raises UsageError if it cannot be
    made.
    """
    made = _custom(state) if name == CUSTOM else _named(state, name)
    return made.with_reductions() if state.reduces else made


def timeline(state: State, name: str) -> Timeline:
    """The simulated timeline of the schedule `name`. Raises UsageError for one that cannot be made, and ScheduleError
    for one that cannot run.
    """
    made = schedule(state, name)
    return _simulated(made, state.cost_model(made.placement))


def _named(state: State, name: str) -> Schedule:
    known = options_of(name)
    options = {option: value for option, value in state.options.items() if option in known}
    if "cost" in known:  # the schedule is made for given costs, which are per stage
        options["cost"] = state.cost_model(make_schedule(name, ranks=state.ranks, microbatches=1).placement)
    return _kept(name, state.ranks, state.microbatches, tuple(options.items()))


@lru_cache(KEPT)
def _kept(name: str, ranks: int, microbatches: int, options: tuple[tuple[str, Any], ...]) -> Schedule:
    return make_schedule(name, ranks=ranks, microbatches=microbatches, **dict(options))


@lru_cache(KEPT)
def _simulated(made: Schedule, cost: CostModel) -> Timeline:
    return simulate(made, cost)


def _custom(state: State) -> Schedule:
    if not state.rows:
        raise UsageError("there is no schedule of your own yet: choose one and edit it")
    return Schedule.from_csv(state.rows, state.placement, name=CUSTOM)
