"""Sources: the schedule behind a SCHEDULE argument: from the registry, from a CSV file, or from a timeline in a JSON
file.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, final

from pipeflow.analysis.executed import executed_schedule
from pipeflow.analysis.lowering import lower
from pipeflow.analysis.memory_cap import MemoryCap
from pipeflow.analysis.simulation import simulate
from pipeflow.cli.costs import Costs
from pipeflow.cli.limits import require_size
from pipeflow.cli.options import flag
from pipeflow.cli.progress import doing
from pipeflow.cli.request import Request, is_file
from pipeflow.core.errors import UsageError
from pipeflow.core.files import read_text
from pipeflow.core.placement import Placement
from pipeflow.core.schedule import Schedule
from pipeflow.core.text import printable
from pipeflow.core.timeline import Timeline
from pipeflow.orders.optimizer_steps import with_optimizer_step
from pipeflow.schedules import SCHEDULES, make_schedule, options_of
from pipeflow.schedules.memory import with_memory_kinds
from pipeflow.soundness.schedule import Violation, verify, verify_programs

MAKE_PLACEMENT: dict[str, Callable[[int, int], Placement]] = {  # from the numbers of ranks and stages
    "linear": lambda ranks, _: Placement.linear(ranks),
    "looped": lambda ranks, stages: Placement.looped(ranks, max(stages // ranks, 1)),
    "vee": lambda ranks, stages: Placement.zigzag(ranks, max(stages // (2 * ranks), 1)),  # as many vees as fit
    "bidirectional": lambda ranks, _: Placement.bidirectional(ranks),
}


@final
@dataclass(frozen=True, slots=True)
class ScheduleSource:
    """The schedule behind an argument.

    Attributes:
        schedule: the schedule.
        measured: the timeline that it was read from, if any.
    """

    schedule: Schedule
    measured: Timeline | None = None

    def timeline(self, costs: Costs) -> Timeline:
        """The measured timeline, otherwise a simulation under `costs`. Raises UsageError for costs with a measured
        timeline.
        """
        if self.measured is None:
            with doing(f"simulating {printable(self.schedule.name)}"):
                return simulate(self.schedule, costs.model(self.schedule.placement))
        if costs.given is not None:
            raise UsageError(f"{costs.given} is for schedules; a timeline has its own times")
        return self.measured


def sound_source(name: str, request: Request) -> ScheduleSource:
    """Like `source`, but raises UsageError for a file whose schedule is unsound."""
    found = source(name, request)
    if name not in SCHEDULES and (violations := violations_of(found.schedule)):
        many = f"{len(violations)} violation{'s' * (len(violations) > 1)}, the first"
        raise UsageError(f"{name} is unsound, {many}: {violations[0]}; see pipeflow verify")
    return found


def violations_of(
    schedule: Schedule, memory_cap: MemoryCap | None = None, costs: Costs | None = None
) -> list[Violation]:
    """Everything that is wrong with a schedule or, if nothing is, with its programs. With `costs`, microbatches keep as
    much as their factors say.
    """
    options: dict[str, Any] = {}
    if memory_cap is not None:
        factors = () if costs is None else costs.model(schedule.placement).microbatch_factors
        options = {"memory_cap": memory_cap, "microbatch_factors": factors}
    with doing(f"proving {printable(schedule.name)}"):
        return verify(schedule, **options) or verify_programs(lower(schedule))


def source(name: str, request: Request) -> ScheduleSource:
    """The schedule behind an argument. Raises UsageError with the part of the request that does not fit it."""
    found = _from_file(name, request) if is_file(name) else ScheduleSource(_from_name(name, request))
    if request.memory:
        found = replace(found, schedule=_with_memory_kinds(found, request))
    if request.costs.reduce and found.measured is None:
        found = replace(found, schedule=found.schedule.with_reductions())
    if request.costs.optimizer and found.measured is None:
        found = replace(found, schedule=with_optimizer_step(found.schedule))
    return replace(found, schedule=found.schedule.forward_only()) if request.forward_only else found


def _with_memory_kinds(found: ScheduleSource, request: Request) -> Schedule:
    schedule, stages = found.schedule, dict(request.memory)
    if found.measured is not None:
        raise UsageError(f"{flag(f'{next(iter(stages))}_stages')} is for schedules; a timeline shows what ran")
    cost = request.costs.model(schedule.placement) if "offload" in stages else None
    return with_memory_kinds(schedule, **stages, cost=cost)


def _from_name(name: str, request: Request) -> Schedule:
    if request.placement is not None:
        raise UsageError(f"--placement is for CSV files; schedule {name!r} has its own")
    ranks, microbatches = request.ranks, request.microbatches
    ranks, microbatches = 4 if ranks is None else ranks, 8 if microbatches is None else microbatches
    options: dict[str, object] = dict(request.options)
    require_size(ranks, microbatches, options)
    if name in SCHEDULES and "cost" in options_of(name):  # the schedule is made for given costs, which are per stage
        options["cost"] = request.costs.model(make_schedule(name, ranks=ranks, microbatches=1).placement)
    with doing(f"making {printable(name)}"):
        return make_schedule(name, ranks=ranks, microbatches=microbatches, **options)


def _from_file(name: str, request: Request) -> ScheduleSource:
    for option, value in (("ranks", request.ranks), *request.options):
        if value is not None:
            raise UsageError(f"{flag(option)} is for named schedules; {name} has its own")
    text = read_text(name)
    try:
        if name.endswith(".json") or text.lstrip().startswith("{"):
            return _from_timeline(Timeline.from_json(text), request)
        schedule = Schedule.from_csv(text, None, request.microbatches, name=name)
        return ScheduleSource(schedule if request.placement is None else _placed(schedule, request.placement))
    except UsageError as error:
        raise UsageError(f"{name}: {error}") from None


def _placed(schedule: Schedule, placement: str) -> Schedule:
    """The schedule with the named placement instead of the one that its rows show."""
    ranks = len(schedule.rows)
    stages = 1 + max(action.stage for rank in range(ranks) for action in schedule.actions(rank))
    return replace(schedule, placement=MAKE_PLACEMENT[placement](ranks, stages))


def _from_timeline(timeline: Timeline, request: Request) -> ScheduleSource:
    given = {
        "microbatches": request.microbatches,
        "placement": request.placement,
        "forward_only": request.forward_only or None,
    }
    for option, value in given.items():
        if value is not None:
            raise UsageError(f"{flag(option)} is for schedules; a timeline has its own")
    return ScheduleSource(executed_schedule(timeline), timeline)
