"""Opened: what is in a file that the reader opened: a timeline as JSON, or a schedule as CSV."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from pipeflow.analysis.executed import executed_schedule
from pipeflow.analysis.trace_costs import measured_costs
from pipeflow.core.cost import CostModel
from pipeflow.core.dataflow import Stream
from pipeflow.core.errors import UsageError
from pipeflow.core.schedule import Schedule
from pipeflow.core.timeline import Timeline
from pipeflow.explore.depth import spread
from pipeflow.soundness.schedule import verify

KEPT = 16  # files


@dataclass(frozen=True)
class Opened:
    """A file that was read.

    Attributes:
        source: its name and its text.
        schedule: the schedule in it, or the one that the timeline ran.
        measured: the timeline; None: the file has a schedule.
        problem: why the schedule is unsound, if it is.
    """

    source: tuple[str, str]
    schedule: Schedule
    measured: Timeline | None = None
    problem: str = ""

    @property
    def reduces(self) -> bool:
        """Whether it has reductions, so that the schedules beside it get them."""
        return Stream.REDUCE in self.schedule.streams

    @cached_property
    def _costs(self) -> CostModel:
        assert self.measured is not None  # a schedule has no costs
        return measured_costs(self.measured)

    def costs(self, stages: int) -> CostModel:
        """The costs that the timeline shows. For another number of stages they are divided by depth."""
        costs = self._costs
        return replace(
            costs,
            forward=spread(costs.forward, stages),
            backward_input=spread(costs.backward_input, stages),
            backward_weight=spread(costs.backward_weight, stages),
            reduce=spread(costs.reduce, stages),
            times={kind: spread(times, stages) for kind, times in costs.times.items()},
        )


@lru_cache(KEPT)
def opened(name: str, text: str) -> Opened:
    """The schedule or timeline in the text of a file. Raises UsageError that names the wrong place, and for a
    timeline of an unsound schedule.
    """
    try:
        if text.lstrip().startswith("{"):
            measured = Timeline.from_json(text)
            measured = replace(measured, name=f"{measured.name} ({name})")
            found = Opened((name, text), executed_schedule(measured), measured)
        else:
            found = Opened((name, text), Schedule.from_csv(text, name=name))
        violations = verify(found.schedule)
    except UsageError as error:
        raise UsageError(f"{name}: {error}") from None
    if not violations:
        return found
    more = f" (and {len(violations) - 1} more)" if len(violations) > 1 else ""
    problem = f"{name} is not a sound schedule: {violations[0]}{more}"
    if found.measured is not None:
        raise UsageError(problem)
    return replace(found, problem=problem)
