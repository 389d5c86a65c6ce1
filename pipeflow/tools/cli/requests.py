"""Requests: the schedules that the arguments of a command ask for, and the costs that they give; what is too large, and
options that a mode of a command does not read, are refused. Must not contain: how schedules are made.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, final

from pipeflow.core.analysis.lowering import lower
from pipeflow.core.analysis.measured_step import measured_costs
from pipeflow.core.cost import EVEN_COSTS, CostModel, even_costs, read_costs, without_use
from pipeflow.core.dataflow import Stream
from pipeflow.core.errors import UsageError, Violation
from pipeflow.core.files import read_text
from pipeflow.core.liveness import MemoryCap
from pipeflow.core.placement import Placement
from pipeflow.core.schedule import Schedule
from pipeflow.core.soundness.transfers import verify_programs
from pipeflow.core.soundness.verification import verify
from pipeflow.core.text import listed, printable
from pipeflow.core.timeline import Timeline
from pipeflow.planning.schedule_request import PER_RANK, ReadSchedule, ScheduleRequest
from pipeflow.schedules import SCHEDULES, options_of
from pipeflow.schedules.orders.additions import STAGE_OPTIONS
from pipeflow.schedules.registry import family_options
from pipeflow.tools.cli.options import PLACEMENTS, flag, values_of
from pipeflow.tools.cli.outputs import doing

Read = TypeVar("Read")
LARGEST = 1_000_000  # stages times microbatches: needs a gigabyte of memory, and half a minute


def require_size(request: ScheduleRequest) -> None:
    """Raises UsageError if a named schedule has more actions than a machine can hold. Other wrong numbers are left to
    it.
    """
    stages, microbatches = request.size
    if stages > 0 and stages * max(microbatches, 1) > LARGEST:
        sizes = {"ranks": request.ranks, "microbatches": request.microbatches, **dict(request.options)}
        asked = [f"{sizes[name]:,} {name}" for name in ("ranks", "microbatches", *PER_RANK) if name in sizes]
        raise UsageError(f"{' x '.join(asked)} is too large: stages times microbatches may be at most {LARGEST:,}")


ADDING = ("reduce", "optimizer")  # costs that give a schedule the actions that have them


@final
@dataclass(frozen=True)
class GivenCosts:
    """The costs that arguments give.

    Attributes:
        even: even costs, by their names in `EVEN_COSTS`.
        per_stage: costs per stage, used instead of even ones; None: none.
        file: the file that has these; empty: they were measured.
    """

    even: Mapping[str, float] = field(default_factory=dict, hash=False)
    per_stage: CostModel | None = None
    file: str = ""

    @classmethod
    def of(cls, arguments: argparse.Namespace) -> GivenCosts:
        """The costs that the arguments give. Raises UsageError for even costs together with a file, and for a file that
        is wrong.
        """
        even = values_of(arguments, EVEN_COSTS)
        if arguments.costs is None:
            return cls(even)
        if even:
            raise UsageError(f"{flag(min(even))} and --costs are two ways to give costs: choose one")
        return cls({}, read_as(arguments.costs, read_costs), arguments.costs)

    @property
    def given(self) -> str | None:
        """An option that gave a cost; None if there is none."""
        return "--costs" if self.file else next(map(flag, self.even), None)

    @property
    def times_only(self) -> str | None:
        """An option that gave a cost and adds no actions; None if there is none."""
        if self.per_stage is not None:
            return None if any(map(self.adds, ADDING)) or self.per_stage.microbatch_factors else "--costs"
        return next((flag(name) for name in self.even if name not in ADDING), None)

    def adds(self, name: str) -> bool:
        """Whether costs of this name were given, so that schedules need what has them."""
        return bool(getattr(self.per_stage, name)) if self.file else name in self.even

    def cost_model(self, placement: Placement) -> CostModel:
        """The costs of `placement`. Raises UsageError for costs of another number of stages."""
        if self.per_stage is None:
            return even_costs(placement, self.even)
        there, stages = len(self.per_stage.forward), placement.num_stages
        if there == stages:
            return self.per_stage
        if self.file:
            raise UsageError(f"{self.file}: costs are per stage: the file has {there}, not {stages}")
        raise UsageError(f"costs measured on {there} stages do not fit {stages}: give costs, as in --forward 1")


def read_as(path: str, read: Callable[[str], Read]) -> Read:
    """What `read` makes of the text of a file. Raises UsageError that names the file."""
    text = read_text(path)
    try:
        return read(text)
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from None


def request_of(name: str, arguments: argparse.Namespace, costs: GivenCosts) -> ScheduleRequest:
    """The schedule `name` with the options of a command with schedule_options. Raises UsageError for options that do
    not fit it, and for a file that cannot be read.
    """
    stages = tuple(values_of(arguments, STAGE_OPTIONS).items())
    request = ScheduleRequest(name, costs, stages=stages, forward_only=arguments.forward_only)
    if is_file(name):
        request = replace(request, read=_read(name, arguments))
        if request.measured is not None:
            return request
    else:
        if arguments.placement is not None:
            raise UsageError(f"--placement is for CSV files; schedule {name!r} has its own")
        options = tuple(values_of(arguments, family_options()).items())
        request = replace(request, options=options, **values_of(arguments, ("ranks", "microbatches")))
        require_size(request)
    return replace(request, reduces=costs.adds("reduce"), steps=costs.adds("optimizer"))


def _read(name: str, arguments: argparse.Namespace) -> ReadSchedule:
    """The schedule or the timeline in a file. Raises UsageError also for options that are not for it."""
    if named := list(values_of(arguments, ("ranks", *family_options()))):
        raise UsageError(f"{flag(named[0])} is for named schedules; {name} has its own")
    read = read_as(name, lambda text: ReadSchedule.of(name, text, arguments.microbatches))
    if read.measured is None:
        return read if arguments.placement is None else _placed(read, arguments.placement)
    names = ("microbatches", "placement", *["forward_only"] * arguments.forward_only)
    if own := list(values_of(arguments, names)):
        raise UsageError(f"{name}: {flag(own[0])} is for schedules; a timeline has its own")
    if saving := list(values_of(arguments, STAGE_OPTIONS)):
        raise UsageError(f"{flag(saving[0])} is for schedules; a timeline shows what ran")
    return read


def changed(arguments: argparse.Namespace, **values: object) -> argparse.Namespace:
    """The arguments with other values of some options."""
    return argparse.Namespace(**{**vars(arguments), **values})


def is_file(name: str) -> bool:
    """Whether an argument is a file: it looks like a path, or there is a file with this name."""
    return name not in SCHEDULES and ("." in name or os.path.dirname(name) != "" or os.path.isfile(name))


def _placed(read: ReadSchedule, placement: str) -> ReadSchedule:
    """A schedule with the named placement instead of the one that its rows show."""
    schedule, ranks = read.schedule, len(read.schedule.rows)
    stages = 1 + max(action.stage for rank in range(ranks) for action in schedule.actions(rank))
    made = replace(schedule, placement=PLACEMENTS[placement](ranks, stages))
    return replace(read, source=(read.source, placement), schedule=made)


def schedule_of(request: ScheduleRequest) -> Schedule:
    """The schedule that is asked for. Raises UsageError if it cannot be made."""
    with doing(f"making {printable(request.name)}"):
        return request.schedule()


def sound_schedule(request: ScheduleRequest) -> Schedule:
    """The same. Raises UsageError also for a file whose schedule is unsound."""
    schedule = schedule_of(request)
    if request.read is not None and (violations := violations_of(schedule)):
        many = f"{len(violations)} violation{'s' * (len(violations) > 1)}, the first"
        raise UsageError(f"{request.name} is unsound, {many}: {violations[0]}; see pipeflow verify")
    return schedule


def ordered_schedule(name: str, arguments: argparse.Namespace, costs: GivenCosts) -> Schedule:
    """The schedule `name`, for commands that show an order and no times. Raises UsageError for costs that it does not
    depend on.
    """
    request = request_of(name, arguments, costs)
    schedule = schedule_of(request)
    _require_no_costs(request, costs)
    if not request.is_made_for_costs and (unread := costs.times_only):
        raise UsageError(f"{unread} does not change the order of {name}: leave it out")
    return schedule


def timeline_of(name: str, arguments: argparse.Namespace) -> Timeline:
    """The timeline of the schedule `name`, which is sound, or the one that was measured. Raises UsageError for costs
    beside a measured one, or that do not fit.
    """
    costs = GivenCosts.of(arguments)
    request = request_of(name, arguments, costs)
    schedule = sound_schedule(request)
    _require_no_costs(request, costs)
    timeline = _simulated(request, schedule)
    refuse_costs(costs, schedule)
    return timeline


def _require_no_costs(request: ScheduleRequest, costs: GivenCosts) -> None:
    if request.measured is not None and costs.given is not None:
        raise UsageError(f"{costs.given} is for schedules; a timeline has its own times")


def _simulated(request: ScheduleRequest, schedule: Schedule) -> Timeline:
    with doing(f"simulating {printable(schedule.name)}"):
        return request.timeline(schedule)


def violations_of(
    schedule: Schedule, memory_cap: MemoryCap | None = None, costs: GivenCosts | None = None
) -> list[Violation]:
    """Everything that is wrong with a schedule or, if nothing is, with its programs. With `costs`, microbatches keep as
    much as their factors say.
    """
    options: dict[str, Any] = {}
    if memory_cap is not None:
        factors = () if costs is None else costs.cost_model(schedule.placement).microbatch_factors
        options = {"memory_cap": memory_cap, "microbatch_factors": factors}
    with doing(f"proving {printable(schedule.name)}"):
        return verify(schedule, **options) or verify_programs(lower(schedule))


@final
@dataclass(frozen=True, slots=True)
class Compared:
    """Several SCHEDULE arguments that are compared, under the same costs.

    Attributes:
        files: per name of a file, what is asked for, which is sound.
        arguments: the options for named schedules, of which each takes those that it has.
        costs: the costs that were given, or measured.
        reduces: whether named schedules get reductions, because a file has them.
    """

    files: Mapping[str, ScheduleRequest]
    arguments: argparse.Namespace
    costs: GivenCosts
    reduces: bool

    @classmethod
    def of(cls, names: Sequence[str], arguments: argparse.Namespace) -> Compared:
        """The schedules with these names. A named schedule takes the sizes of the first file, unless sizes are given,
        and the costs of the first measured file, unless costs are given.

        Raises UsageError for a file that cannot be read or is unsound, for an option that applies to none, and for
        costs if everything was measured.
        """
        known, costs = [name for name in names if name in SCHEDULES], GivenCosts.of(arguments)
        for option in values_of(arguments, family_options()):
            if known and not any(option in options_of(name) for name in known):
                raise UsageError(f"none of {', '.join(known)} takes {flag(option)}")
        paths, placed = list(filter(is_file, names)), arguments
        if len(paths) < len(names):
            placed = changed(arguments, **dict.fromkeys(("ranks", "microbatches", *family_options())))
        files = {path: request_of(path, placed, costs) for path in paths}
        read = [sound_schedule(each) for each in files.values()]
        measured = [each.measured for each in files.values() if each.measured is not None]
        if costs.given is not None and len(measured) == len({*names}):
            raise UsageError(f"{costs.given} is for schedules; a timeline has its own times")
        if measured and costs.given is None:
            costs = replace(costs, per_stage=measured_costs(measured[0]))
        if read:
            sizes = {"ranks": read[0].placement.num_ranks, "microbatches": read[0].num_microbatches}
            arguments = changed(arguments, **sizes | values_of(arguments, sizes), placement=None)
        files = {path: replace(each, prices=costs) for path, each in files.items()}
        return cls(files, arguments, costs, any(Stream.REDUCE in schedule.streams for schedule in read))

    def request(self, name: str) -> ScheduleRequest:
        """The request for the schedule with this name. Raises UsageError for options that do not fit it."""
        if name in self.files:
            return self.files[name]
        known = options_of(name) if name in SCHEDULES else ()
        without = dict.fromkeys(option for option in family_options() if option not in known)
        request = request_of(name, changed(self.arguments, **without), self.costs)
        return replace(request, reduces=request.reduces or self.reduces)

    def both(self, name: str) -> tuple[Schedule, Timeline]:
        """A schedule and its timeline: the measured one, otherwise a simulation under the costs. Raises UsageError for
        one that cannot be made in the given size, and for costs that do not fit.
        """
        request = self.request(name)
        schedule = schedule_of(request)
        return schedule, _simulated(request, schedule)


def refuse(arguments: argparse.Namespace, names: Collection[str], why: str) -> None:
    """Raises UsageError if an option among `names` was given. `why` says in which mode nothing reads it."""
    _refuse([typed for name, typed in arguments.given.items() if name in names], why)


def refuse_all_but(arguments: argparse.Namespace, names: Collection[str], why: str) -> None:
    """Raises UsageError if an option was given that is not among `names`."""
    refuse(arguments, arguments.given.keys() - {*names}, why)


def refuse_costs(costs: GivenCosts, *schedules: Schedule) -> None:
    """Raises UsageError for costs of what none of the schedules does, such as copies where nothing is offloaded."""
    names = listed(list(dict.fromkeys(schedule.name for schedule in schedules)), "or")
    for name, lacking in without_use(costs.even, schedules):
        _refuse([flag(name)], f"by {names}, without {lacking}")
    if "saved_bytes" not in costs.even:
        sizes = [flag(name) for name in costs.even if EVEN_COSTS[name].unit == "bytes"]
        _refuse(sizes, "without --saved-bytes, since memory is counted in activations")


def _refuse(given: Sequence[str], why: str) -> None:
    if given:
        are, them = ("is", "it") if len(given) == 1 else ("are", "them")
        raise UsageError(f"{listed(given)} {are} not read {why}: leave {them} out")
