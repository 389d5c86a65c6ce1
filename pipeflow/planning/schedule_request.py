"""ScheduleRequest: a schedule that somebody asks for, by a command or in the explorer, and the timeline of it. Must not
contain: how users write what they ask for.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Protocol, final

from pipeflow.core.analysis.measured_step import executed_schedule
from pipeflow.core.analysis.simulation import simulate
from pipeflow.core.cost import CostModel
from pipeflow.core.errors import UsageError
from pipeflow.core.placement import Placement
from pipeflow.core.schedule import Schedule
from pipeflow.core.timeline import Timeline
from pipeflow.schedules import SCHEDULES, make_schedule, options_of
from pipeflow.schedules.orders.additions import gathering, with_memory_kinds, with_optimizer_step
from pipeflow.schedules.registry import is_searched


class Prices(Protocol):
    """Where the costs of schedules come from. Two that are equal have the same costs."""

    def cost_model(self, placement: Placement) -> CostModel:
        """The costs of the stages of `placement`. Raises UsageError if there are none for it."""


@final
@dataclass(frozen=True)
class ReadSchedule:
    """A schedule that was read, compared by what it was read from.

    Attributes:
        name: the name of what it was read from, such as a file.
        source: what it was read from, such as its text.
        schedule: the schedule, or the one that the timeline ran.
        measured: the timeline; None: it was a schedule.
        problem: why it cannot be drawn; empty: it can be, as far as is known.
    """

    name: str
    source: Hashable
    schedule: Schedule = field(compare=False)
    measured: Timeline | None = field(default=None, compare=False)
    problem: str = ""

    @classmethod
    def of(cls, name: str, text: str, microbatches: int | None = None) -> ReadSchedule:
        """From the text of the file `name`: a timeline as JSON, or else a schedule as CSV, which has at least so many
        microbatches. Raises UsageError that names the wrong place.
        """
        if name.endswith(".json") or text.lstrip().startswith("{"):
            measured = Timeline.from_json(text)
            return cls(name, text, executed_schedule(measured), measured)
        return cls(name, (text, microbatches), Schedule.from_csv(text, None, microbatches, name=name))


@final
@dataclass(frozen=True)
class ScheduleRequest:
    """A schedule that somebody asks for, by its name or as it was read.

    Attributes:
        name: its name in the registry; of one that was read, any.
        prices: what it costs, and is made for.
        ranks, microbatches: its size if it has a name.
        options: those of its family that are given, as (name, value).
        stages: the stages of each way to save memory, as (name in STAGE_OPTIONS, stages); True: all.
        read: what was read; None: it has a name.
        title: what it is called in drawings; empty: as its family calls it.
        candidates: orders that a search tries; None: as many as it does by default.
        gathers, reduces, steps: whether it gathers the weights of its stages, reduces their gradients, and has the
            optimizer's steps.
        forward_only: whether backwards are left out.
    """

    name: str
    prices: Prices
    ranks: int = 4
    microbatches: int = 8
    options: tuple[tuple[str, Any], ...] = ()
    stages: tuple[tuple[str, bool | tuple[int, ...]], ...] = ()
    read: ReadSchedule | None = None
    title: str = ""
    candidates: int | None = None
    gathers: bool = False
    reduces: bool = False
    steps: bool = False
    forward_only: bool = False

    @property
    def measured(self) -> Timeline | None:
        """The timeline that was read, if it was one."""
        return None if self.read is None else self.read.measured

    @property
    def is_made_for_costs(self) -> bool:
        """Whether its order depends on the costs."""
        return "offload_stages" in dict(self.stages) or (self.read is None and is_searched(self.name))

    @property
    def size(self) -> tuple[int, int]:
        """The numbers of stages and of microbatches of a named schedule, before it is made."""
        options = dict(self.options)
        stages = self.ranks * _stages_per_rank(self.name, None)
        for option in {*PER_RANK} & {*options}:
            stages = self.ranks * _stages_per_rank(self.name, option) * max(int(options[option]), 1)
        return stages, self.microbatches

    def schedule(self) -> Schedule:
        """Makes the schedule. Raises UsageError if it cannot be made."""
        if self.measured is not None and self.read is not None:
            return self.read.schedule  # as it ran
        if self.read is None:
            made = self._named()
        elif self.read.problem:
            raise UsageError(self.read.problem)
        else:
            made = self.read.schedule
        stages = {option.removesuffix("_stages"): each for option, each in self.stages}
        cost = self.prices.cost_model(made.placement) if "offload" in stages else None
        made = self.completed(with_memory_kinds(made, **stages, cost=cost))
        return made.forward_only() if self.forward_only else made

    def timeline(self, schedule: Schedule) -> Timeline:
        """The timeline that was read, otherwise a simulation of `schedule`, which was made. Raises UsageError for costs
        that do not fit it, and ScheduleError if it cannot run.
        """
        return self.measured or simulate(schedule, self.prices.cost_model(schedule.placement))

    def _named(self) -> Schedule:
        name, ranks, microbatches, options = self.name, self.ranks, self.microbatches, dict(self.options)
        if is_searched(name):  # it is made for given costs, which are per stage
            options["cost"] = self.prices.cost_model(make_schedule(name, ranks=ranks, microbatches=1).placement)
        if is_searched(name) and self.candidates is not None:
            made = SCHEDULES[name](ranks, microbatches, self.candidates, **options)
        else:
            made = make_schedule(name, ranks=ranks, microbatches=microbatches, **options)
        return replace(made, name=self.title) if self.title else made

    def completed(self, schedule: Schedule) -> Schedule:
        """A schedule with the gathers, the reductions and the optimizer's steps that are asked for."""
        if self.gathers and schedule.placement.num_ranks > 1:
            schedule = gathering(schedule)
        if self.reduces:
            schedule = schedule.with_reductions()
        return with_optimizer_step(schedule) if self.steps else schedule


PER_RANK = ("chunks", "waves")  # options that set the number of stages per rank


@cache
def _stages_per_rank(name: str, option: str | None) -> int:
    """The stages per rank of a named schedule, by default or with an option that is 1; 1 if it has no such option."""
    if name not in SCHEDULES or option not in (None, *options_of(name)):
        return 1
    options = {} if option is None else {option: 1}
    return int(make_schedule(name, ranks=2, microbatches=1, **options).placement.chunks_per_rank)
