"""What a SCHEDULE argument stands for: a schedule of the registry, a CSV file, or a timeline kept as JSON."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, final

from pipeflow.analysis.lower import lower
from pipeflow.analysis.simulate import simulate
from pipeflow.cli.costs import Costs
from pipeflow.cli.files import read
from pipeflow.cli.options import family_options, flag
from pipeflow.core.action import Entry, Kind, Pair
from pipeflow.core.dataflow import DATAFLOW
from pipeflow.core.errors import UsageError
from pipeflow.core.placement import Placement
from pipeflow.core.reductions import ADDS
from pipeflow.core.schedule import Schedule
from pipeflow.core.span import Row
from pipeflow.core.timeline import Timeline
from pipeflow.schedules import SCHEDULES, make_schedule, options_of
from pipeflow.soundness.schedule import Violation, verify, verify_programs

MAKE_PLACEMENT = {"linear": Placement.linear, "vee": Placement.vee, "bidirectional": Placement.bidirectional}


@final
@dataclass(frozen=True, slots=True)
class Asked:
    """What the options say about schedules; None is what they leave open."""

    costs: Costs
    ranks: int | None = None
    microbatches: int | None = None
    options: tuple[tuple[str, float], ...] = ()
    placement: str | None = None
    forward_only: bool = False

    @classmethod
    def of(cls, arguments: argparse.Namespace) -> Asked:
        """From the arguments of a command with schedule_options and cost_options."""
        given = [(name, getattr(arguments, name)) for name in family_options()]
        return cls(
            Costs.of(arguments),
            arguments.ranks,
            arguments.microbatches,
            tuple((name, value) for name, value in given if value is not None),
            arguments.placement,
            arguments.forward_only,
        )

    def among(self, names: list[str]) -> dict[str, Asked]:
        """Per name of several, what of this is for it: sizes for the named schedules, each with the options that it
        has, the placement for files. Raises UsageError for what is for none of them.
        """
        families = [name for name in names if not is_file(name)]
        files = [name for name in names if is_file(name)]
        known = [name for name in families if name in SCHEDULES]
        for option, _ in self.options:
            if known and not any(option in options_of(name) for name in known):
                raise UsageError(f"none of {', '.join(known)} takes {flag(option)}")
        sized = replace(self, placement=None) if files else self
        placed = replace(self, ranks=None, microbatches=None, options=()) if families else self
        return {name: placed if name in files else sized.fitting(name) for name in names}

    def fitting(self, name: str) -> Asked:
        """Without the options that the schedule `name` does not have."""
        known = options_of(name) if name in SCHEDULES else ()
        return replace(self, options=tuple((option, value) for option, value in self.options if option in known))


@final
@dataclass(frozen=True, slots=True)
class Plan:
    """A schedule and, when it was read from a timeline, that."""

    schedule: Schedule
    measured: Timeline | None = None

    def timeline(self, costs: Costs) -> Timeline:
        """When everything runs: as it was measured, else under `costs`."""
        if self.measured is None:
            return simulate(self.schedule, costs.model(self.schedule.placement))
        if costs.given is not None:
            raise UsageError(f"{costs.given} is for schedules; the times of a timeline are its own")
        return self.measured


def is_file(name: str) -> bool:
    """Whether an argument means a file: because it looks like one, or because there is one."""
    return name not in SCHEDULES and ("." in name or os.path.dirname(name) != "" or os.path.isfile(name))


def sound_plan(name: str, asked: Asked) -> Plan:
    """As `plan`, and raises UsageError for a file whose schedule is unsound."""
    found = plan(name, asked)
    if name not in SCHEDULES and (violations := violations_of(found.schedule)):
        many = f"{len(violations)} violation{'s' * (len(violations) > 1)}, the first"
        raise UsageError(f"{name} is unsound, {many}: {violations[0]}; see pipeflow verify")
    return found


def violations_of(schedule: Schedule, memory_cap: float | None = None) -> list[Violation]:
    """What is wrong with a schedule or, when nothing is, with its programs."""
    options: dict[str, Any] = {} if memory_cap is None else {"memory_cap": memory_cap}
    return verify(schedule, **options) or verify_programs(lower(schedule))


def plan(name: str, asked: Asked) -> Plan:
    """The plan that an argument stands for. Raises UsageError saying which part of what was asked it does not fit."""
    found = _from_file(name, asked) if is_file(name) else Plan(_from_name(name, asked))
    if asked.costs.reduce and found.measured is None:
        found = replace(found, schedule=found.schedule.with_reductions())
    return replace(found, schedule=found.schedule.forward_only()) if asked.forward_only else found


def _from_name(name: str, asked: Asked) -> Schedule:
    if asked.placement is not None:
        raise UsageError(f"--placement is for CSV files; schedule {name!r} has its own")
    ranks, microbatches = asked.ranks, asked.microbatches
    ranks, microbatches = 4 if ranks is None else ranks, 8 if microbatches is None else microbatches
    options: dict[str, object] = dict(asked.options)
    if name in SCHEDULES and "cost" in options_of(name):  # it is made for its costs, which are per stage
        options["cost"] = asked.costs.model(make_schedule(name, ranks=ranks, microbatches=1).placement)
    return make_schedule(name, ranks=ranks, microbatches=microbatches, **options)


def _from_file(name: str, asked: Asked) -> Plan:
    for option, value in (("ranks", asked.ranks), *asked.options):
        if value is not None:
            raise UsageError(f"{flag(option)} is for named schedules; {name} has its own")
    text = read(name)
    try:
        if name.endswith(".json") or text.lstrip().startswith("{"):
            return _from_timeline(Timeline.from_json(text), asked)
        make_placement = MAKE_PLACEMENT.get(asked.placement or "looped")
        placement = make_placement(len(text.strip("\n").split("\n"))) if make_placement else None
        schedule = Schedule.from_csv(text, placement, asked.microbatches, name=name)
        return Plan(_in_waves(schedule) if asked.placement == "vee" else schedule)
    except UsageError as error:
        raise UsageError(f"{name}: {error}") from None


def _in_waves(schedule: Schedule) -> Schedule:
    """With the stages down the ranks and back up as often as there are stages for it."""
    ranks = len(schedule.rows)
    stages = 1 + max(action.stage for rank in range(ranks) for action in schedule.actions(rank))
    return replace(schedule, placement=Placement.zigzag(ranks, max(stages // (2 * ranks), 1)))


def _from_timeline(timeline: Timeline, asked: Asked) -> Plan:
    given = {
        "microbatches": asked.microbatches,
        "placement": asked.placement,
        "forward_only": asked.forward_only or None,
    }
    for option, value in given.items():
        if value is not None:
            raise UsageError(f"{flag(option)} is for schedules; a timeline says it itself")
    actions = [span.action for span in timeline]
    microbatches = max((action.microbatch for action in actions), default=0) + 1
    if microbatches > max(len(actions), 1):
        raise UsageError(f"{len(actions)} actions are too few for {microbatches} microbatches")
    rows = tuple(tuple(_entries(row)) for row in timeline.rows)
    return Plan(Schedule(timeline.name, timeline.placement, microbatches, rows), timeline)


def _entries(row: Row) -> Iterator[Entry]:
    """What ran; each joint action, which may have begun late, after the weight gradient that it waited for."""
    joint = [span.action for span in row if DATAFLOW[span.action.kind].joint]
    waiting = {(action.stage, action.microbatch): action for action in joint}
    for span in (span for span in row if not DATAFLOW[span.action.kind].joint):
        action = span.action
        if span.partner is None:
            yield action
        elif action.kind is Kind.F:
            yield Pair(action, span.partner)
        if action.kind in ADDS and (reduction := waiting.pop((action.stage, action.microbatch), None)):
            yield reduction
    yield from waiting.values()
