"""Made: the schedules and timelines that a state asks for; those that were asked for last are kept."""

from __future__ import annotations

from collections.abc import Hashable

from pipeflow.analysis.draft import Draft, draft
from pipeflow.analysis.simulate import simulate
from pipeflow.core.errors import UsageError
from pipeflow.core.schedule import Schedule
from pipeflow.core.timeline import Timeline
from pipeflow.explore.fields import CUSTOM
from pipeflow.explore.kept import Kept
from pipeflow.explore.rows import read_rows
from pipeflow.explore.state import State
from pipeflow.schedules import make_schedule, options_of

MOST = 500_000  # entries of all schedules that are kept, and spans of all timelines: some 200 MB

_SCHEDULES = Kept[Schedule](MOST, lambda schedule: sum(map(len, schedule.rows)))
_DRAFTS = Kept[Draft](MOST, lambda draft: sum(map(len, draft.timeline.rows)))
_TIMELINES = Kept[Timeline](MOST, lambda timeline: sum(map(len, timeline.rows)))


def schedule(state: State, name: str) -> Schedule:
    """The schedule `name` in the size of `state`, with the options that it has. Raises UsageError if it cannot be
    made.
    """
    return _SCHEDULES.get(_key(state, name), lambda: _made(state, name))


def timeline(state: State, name: str) -> Timeline:
    """The simulated timeline of the schedule `name`. Raises UsageError for one that cannot be made, and ScheduleError
    for one that cannot run.
    """

    def make() -> Timeline:
        made = schedule(state, name)
        return simulate(made, state.cost_model(made.placement))

    return _TIMELINES.get((_key(state, name), _costs(state)), make)


def _key(state: State, name: str) -> Hashable:
    """What the schedule `name` depends on."""
    reduced = state.reduces
    if name == CUSTOM:
        return name, reduced, state.rows, state.placement, state.rows_microbatches
    costs = _costs(state) if "cost" in options_of(name) else None
    return name, reduced, state.ranks, state.microbatches, tuple(state.options_for(name).items()), costs


def _costs(state: State) -> Hashable:
    return tuple(state.costs.items()), state.factors, state.modelled


def _made(state: State, name: str) -> Schedule:
    made = _custom(state) if name == CUSTOM else _named(state, name)
    return made.with_reductions() if state.reduces else made


def drafted(state: State) -> Draft:
    """The reader's own schedule in time, also if it cannot run. Raises UsageError if its rows cannot be read."""

    def make() -> Draft:
        made = schedule(state, CUSTOM)
        return draft(made, state.cost_model(made.placement))

    return _DRAFTS.get((_key(state, CUSTOM), _costs(state)), make)


def _named(state: State, name: str) -> Schedule:
    options = state.options_for(name)
    if "cost" in options_of(name):  # the schedule is made for given costs, which are per stage
        options["cost"] = state.cost_model(make_schedule(name, ranks=state.ranks, microbatches=1).placement)
    return make_schedule(name, ranks=state.ranks, microbatches=state.microbatches, **options)


def _custom(state: State) -> Schedule:
    if not (state.rows or state.placement):
        raise UsageError("there is no schedule of your own yet: choose one and edit it")
    return read_rows(state.rows, state.placement, state.rows_microbatches, CUSTOM)
