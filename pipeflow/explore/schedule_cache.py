"""Made: the schedules and timelines that a state asks for; those that were asked for last are kept."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace

from pipeflow.analysis.measures import Measures
from pipeflow.analysis.partial_timeline import Draft, draft
from pipeflow.analysis.simulation import simulate
from pipeflow.core.errors import UsageError
from pipeflow.core.schedule import Schedule
from pipeflow.core.timeline import Timeline
from pipeflow.explore.fields import CUSTOM
from pipeflow.explore.lru import Kept
from pipeflow.explore.names import file_of, split, title
from pipeflow.explore.rows import read_rows
from pipeflow.explore.state import State
from pipeflow.orders.optimizer_steps import with_optimizer_step
from pipeflow.planning.sharding import gathering
from pipeflow.schedules import SCHEDULES, make_schedule
from pipeflow.schedules.memory import STAGE_OPTIONS, with_memory_kinds
from pipeflow.schedules.registry import is_searched

MOST = 500_000  # entries of all schedules that are kept, and spans of all timelines: some 200 MB

_SCHEDULES = Kept[Schedule](MOST, lambda schedule: sum(map(len, schedule.rows)))
_DRAFTS = Kept[Draft](MOST, lambda draft: sum(map(len, draft.timeline.rows)))
_TIMELINES = Kept[Timeline](MOST, lambda timeline: sum(map(len, timeline.rows)))
_MEASURES = Kept[Measures](4_096, lambda _: 1)


def schedule(state: State, name: str, candidates: int | None = None) -> Schedule:
    """The schedule `name` in the size of `state`, with the options that it has. Raises UsageError if it cannot be
    made. A search tries as many orders as `candidates` says.
    """
    return _SCHEDULES.get(_key(state, name, candidates), lambda: _made(state, name, candidates))


def timeline(state: State, name: str, candidates: int | None = None) -> Timeline:
    """The timeline of the schedule `name`: simulated, or as it was measured. Raises UsageError for one that cannot be
    made, and ScheduleError for one that cannot run.
    """
    file = state.files.get(file_of(name) or "")
    if file is not None and file.measured is not None:
        return file.measured

    def make() -> Timeline:
        made = schedule(state, name, candidates)
        return simulate(made, state.cost_model(made.placement))

    return _TIMELINES.get((_key(state, name, candidates), _costs(state)), make)


def measures(state: State, name: str, candidates: int | None = None) -> Measures:
    """The measures of the schedule `name`. Raises as `timeline` does."""
    key = _key(state, name, candidates), _costs(state)
    return _MEASURES.get(key, lambda: Measures.of(schedule(state, name, candidates), timeline(state, name, candidates)))


def _key(state: State, name: str, candidates: int | None) -> Hashable:
    """The fields on which the schedule `name` depends."""
    added = state.gathers, state.reduces, state.steps
    if name == CUSTOM:
        return name, added, state.rows, state.placement, state.rows_microbatches
    options = state.options_for(name)
    costs = _costs(state) if is_searched(split(name)[0]) or "offload_stages" in options else None
    made_with = added, tuple(options.items()), costs, candidates
    if (file := file_of(name)) is not None:
        return state.files[file].source, made_with
    return name, state.ranks, state.microbatches, made_with


def _costs(state: State) -> Hashable:
    measured = state.measured and state.measured.source
    return tuple(state.costs.items()), state.factors, state.modelled, measured


def _made(state: State, name: str, candidates: int | None) -> Schedule:
    if name == CUSTOM:
        return completed(state, _custom(state))
    if (file := file_of(name)) is None:
        made = _named(state, name, candidates)
    else:
        made = state.files[file].schedule
        if state.files[file].measured is not None:
            return made  # as it ran
        if state.files[file].problem:
            raise UsageError(state.files[file].problem)
    return completed(state, _saving(state, name, made))


def _saving(state: State, name: str, schedule: Schedule) -> Schedule:
    """A schedule with the recomputations, unshards and offloads that the state says."""
    options = state.options_for(name)
    stages = {option.removesuffix("_stages"): options[option] for option in STAGE_OPTIONS if option in options}
    cost = state.cost_model(schedule.placement) if "offload" in stages else None
    return with_memory_kinds(schedule, **stages, cost=cost)


def completed(state: State, schedule: Schedule) -> Schedule:
    """A schedule with the gathers, the reductions and the optimizer's steps that the state's costs have."""
    gathered = gathering(schedule) if state.gathers and schedule.placement.num_ranks > 1 else schedule
    reduced = gathered.with_reductions() if state.reduces else gathered
    return with_optimizer_step(reduced) if state.steps else reduced


def drafted(state: State) -> Draft:
    """The reader's own schedule in time, also if it cannot run. Raises UsageError if its rows cannot be read."""

    def make() -> Draft:
        made = schedule(state, CUSTOM)
        return draft(made, state.cost_model(made.placement))

    return _DRAFTS.get((_key(state, CUSTOM, None), _costs(state)), make)


def _named(state: State, name: str, candidates: int | None) -> Schedule:
    family, given = split(name)[0], state.options_for(name)
    options = {option: value for option, value in given.items() if option not in STAGE_OPTIONS}
    if is_searched(family):  # it is made for given costs, which are per stage
        options["cost"] = state.cost_model(make_schedule(family, ranks=state.ranks, microbatches=1).placement)
    if is_searched(family) and candidates is not None:
        made = SCHEDULES[family](state.ranks, state.microbatches, candidates, **options)
    else:
        made = make_schedule(family, ranks=state.ranks, microbatches=state.microbatches, **options)
    return replace(made, name=title(name))


def _custom(state: State) -> Schedule:
    if not (state.rows or state.placement):
        raise UsageError("there is no schedule of your own yet: choose one and edit it")
    return read_rows(state.rows, state.placement, state.rows_microbatches, CUSTOM)
