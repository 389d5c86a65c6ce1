"""ComparedSchedules: several SCHEDULE arguments that are compared, with the size that a file among them gives and under
the same costs. Must not contain: what is compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import final

from pipeflow.cli.request import Request, is_file
from pipeflow.cli.sources import ScheduleSource, sound_source
from pipeflow.core.dataflow import Stream
from pipeflow.core.errors import UsageError
from pipeflow.core.timeline import Timeline


@final
@dataclass(frozen=True, slots=True)
class ComparedSchedules:
    """The schedules to compare.

    Attributes:
        files: per file name, its schedule.
        parts: per name, the options for it.
        reduces: whether named schedules get reductions, because a file has them.
    """

    files: dict[str, ScheduleSource]
    parts: dict[str, Request]
    reduces: bool

    @classmethod
    def of(cls, names: Sequence[str], request: Request) -> ComparedSchedules:
        """The schedules with these names. A named schedule takes the sizes of the first file, unless sizes are given,
        and the costs of the first measured file, unless costs are given.

        Raises UsageError for a file that cannot be read or is unsound, and for costs if everything was measured.
        """
        parts = request.among([*names])
        files = {name: sound_source(name, parts[name]) for name in names if is_file(name)}
        measured = [source.measured for source in files.values() if source.measured is not None]
        if request.costs.given is not None and len(measured) == len(parts):
            raise UsageError(f"{request.costs.given} is for schedules; a timeline has its own times")
        costs = request.costs
        if measured and costs.given is None:
            from pipeflow.analysis.trace_costs import measured_costs

            costs = replace(costs, measured=measured_costs(measured[0]))
        sized = {name: replace(_sized(part, files.values()), costs=costs) for name, part in parts.items()}
        return cls(files, sized, any(Stream.REDUCE in file.schedule.streams for file in files.values()))

    def source(self, name: str) -> ScheduleSource:
        """The schedule with this name. Raises UsageError if it cannot be made in the given size."""
        if name in self.files:
            return self.files[name]
        schedule = sound_source(name, self.parts[name]).schedule
        return ScheduleSource(schedule.with_reductions() if self.reduces else schedule)

    def timeline(self, name: str, source: ScheduleSource) -> Timeline:
        """The timeline of a schedule: the measured one, otherwise a simulation under the costs. Raises UsageError for
        costs that do not fit.
        """
        return source.measured or source.timeline(self.parts[name].costs)


def _sized(part: Request, files: Iterable[ScheduleSource]) -> Request:
    """The request with the sizes of the first file, unless sizes are given."""
    for schedule in (file.schedule for file in files):
        ranks = schedule.placement.num_ranks if part.ranks is None else part.ranks
        microbatches = schedule.num_microbatches if part.microbatches is None else part.microbatches
        return replace(part, ranks=ranks, microbatches=microbatches)
    return part
