"""Explanation: what a recorded step was, why it took so long, and what other orders would take. Must not contain: how
it is printed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from pipeflow.core.analysis.difference import differences, has_halves, without_halves
from pipeflow.core.analysis.idle_time import critical_path
from pipeflow.core.analysis.measured_step import executed_schedule
from pipeflow.core.analysis.simulation import simulate
from pipeflow.core.cost import CostModel
from pipeflow.core.errors import UsageError, Violation
from pipeflow.core.schedule import Schedule
from pipeflow.core.soundness.verification import verify
from pipeflow.core.timeline import Span, Timeline
from pipeflow.planning.replanning import Candidate, Replan, replan
from pipeflow.planning.step_plan import evened
from pipeflow.schedules.families import schedules_on
from pipeflow.schedules.registry import recognised
from pipeflow.tools.traces.action_names import Names
from pipeflow.tools.traces.events import RankEvents
from pipeflow.tools.traces.files import Paths, read, trace_files
from pipeflow.tools.traces.jobs import OUTLIER, Job, job_of
from pipeflow.tools.traces.readings import is_alike, median_step, replay, unlike
from pipeflow.tools.traces.rebuild import HOW_TO, Hosts, NoPipelineError, Outside, Rebuilt, rebuilt
from pipeflow.tools.traces.trace_findings import Finding, Idle, idle_times, what_stands_out

ORDERS = 2_000_000  # actions in all orders that the search tries
NOTABLE = 0.01  # of a step: what gains less is not worth another order
READING, REBUILT = 0.5, 0.7  # shares of the work after which files are read, and steps rebuilt


class Nearest(NamedTuple):
    """The named schedule that an order is nearest to.

    Attributes:
        name: its name.
        moved: number of entries that stand at another place of their row.
    """

    name: str
    moved: int


@dataclass(frozen=True)
class Explanation:
    """The result of `explain`.

    Attributes:
        timeline: the step of median length, in seconds.
        step_seconds: the length of every step that was recorded.
        schedule: the order that ran.
        names: names of the schedules of the registry that have this order.
        nearest: the nearest of them if none has it; None if there is none on this placement.
        violations: what is wrong with the order.
        replay: the step, simulated under the costs that it shows; None for a step without backwards, or a wrong order.
        replanned: the order that ran and others under these costs; None if there is no replay, or if it takes much more
            or less time than the step, so that these costs do not describe it.
        recut: the order that ran, and the best one, if the same work were cut into equal stages, the most that another
            cut can give. Empty if they gain nothing by it, or `replanned` is None.
        idle: when and why each rank stood still.
        outside: the times of the step before its first action and after its last one, if torch's profiler marks steps.
        findings: what stands out, the most expensive first.
        notes: sentences on what was missing or mended in the traces.
    """

    timeline: Timeline
    step_seconds: tuple[float, ...]
    schedule: Schedule
    names: tuple[str, ...]
    nearest: Nearest | None
    violations: tuple[Violation, ...]
    replay: Timeline | None
    replanned: Replan | None
    recut: tuple[Candidate, ...]
    idle: tuple[Idle, ...]
    outside: tuple[Outside, ...]
    findings: tuple[Finding, ...]
    notes: tuple[str, ...]

    @property
    def cost(self) -> CostModel | None:
        """The costs that the step shows; None like `replanned`."""
        return None if self.replanned is None else self.replanned.cost

    @property
    def gains(self) -> tuple[Candidate, ...]:
        """Other orders under the costs and within the activations of this step, the fastest first."""
        return () if self.replanned is None else tuple(each for each in self.replanned.candidates if each.fits)

    @property
    def best(self) -> Candidate | None:
        """The fastest order within the activations of this step; the one that ran, unless another one is at least 1 %
        faster. None like `replanned`.
        """
        found = self.replanned
        if found is None:
            return None
        return found.best if found.gain(found.best) >= NOTABLE else found.now

    @property
    def critical_path(self) -> tuple[Span, ...]:
        """The chain of actions that the length of the step consists of, earliest first."""
        return tuple(cause.span for cause in critical_path(self.timeline))

    @property
    def outliers(self) -> tuple[int, ...]:
        """The indices of steps that took much longer than the median one."""
        limit = OUTLIER * self.timeline.makespan
        return tuple(index for index, seconds in enumerate(self.step_seconds) if seconds > limit)


def explain(
    paths: Paths,
    *,
    names: str | None = None,
    progress: Callable[[float], None] = lambda share: None,
) -> Explanation | Job:
    """Explains a step of training from what a profiler recorded of it: of a pipeline as an `Explanation`, of a job
    without one, such as FSDP, DDP or a single device, as a `Job`.

    Args:
        paths: a folder of files with a trace of one rank each, or these files: Chrome traces of torch.profiler, also
            compressed; execution traces of Chakra with times (JSON or .et); exports of Nsight Systems (.sqlite);
            OpenTelemetry spans of Megatron-core (JSON), in which one file may have several ranks; or one timeline of
            pipeflow.
        names: a regular expression for the annotations of other engines, with the groups kind, stage and microbatch,
            each of them optional.
        progress: is called with the share of the work that is done.

    Raises UsageError for files that cannot be read and for traces that show no whole step on all ranks. The message
    says what is missing and how to record it.
    """
    found = []
    files = trace_files(paths)
    for number, path in enumerate(files):
        found.append(read(path))
        progress(READING * (number + 1) / len(files))
    try:
        read_as = recorded_steps(found, names)
    except NoPipelineError as error:
        return job_of(error.ranks, error.notes)
    progress(REBUILT)
    return _explained(*read_as)


def recorded_steps(files: Sequence[Timeline | Sequence[RankEvents]], names: str | None = None) -> Rebuilt:
    """The timelines of the steps in files that were read, as `explain` takes them."""
    timelines = [each for each in files if isinstance(each, Timeline)]
    events = [rank for each in files if not isinstance(each, Timeline) for rank in each]
    if timelines and (events or len(timelines) > 1):
        raise UsageError("give one timeline, or traces of all ranks of one run")
    if timelines and names is not None:
        raise UsageError("names is for annotations of other engines, and a timeline of pipeflow has none: leave it out")
    if not files:
        raise UsageError(f"give the traces of a run: {HOW_TO}")
    return Rebuilt(timelines, []) if timelines else rebuilt(events, Names(names))


def _explained(
    steps: Sequence[Timeline],
    notes: Sequence[str],
    around: Sequence[Sequence[Outside]] = (),
    hosts: Sequence[Hosts] = (),
) -> Explanation:
    median = median_step(steps)
    place = steps.index(median)
    outside = around[place] if around else ()
    schedule = executed_schedule(median)
    known = recognised(schedule)
    nearest = None if known else _nearest(schedule)
    if nearest is not None and not nearest.moved:  # too large to be looked up
        known, nearest = (nearest.name,), None
    name = known[0] if known else "own order"
    timeline, schedule = replace(median, name=name), replace(schedule, name=name)
    wrong = verify(schedule)
    played = None if wrong or schedule.is_forward_only else replay(median)
    found = None
    if played is not None and is_alike(played, median):
        many = sum(map(len, timeline.rows))
        found = replan(timeline, candidates=max(10, min(1000, ORDERS // many)))
    elif played is not None:
        notes = [*notes, f"no other order is shown for this step: {unlike(played, median)}"]
    idle = idle_times(timeline)
    return Explanation(
        timeline,
        tuple(each.makespan for each in steps),
        schedule,
        known,
        nearest,
        tuple(wrong),
        played,
        found,
        () if found is None else tuple(_recut(found)),
        tuple(idle),
        tuple(outside),
        tuple(what_stands_out(timeline, idle, outside, hosts[place] if hosts else None)),
        tuple(notes),
    )


def _recut(found: Replan) -> Iterator[Candidate]:
    """The order that ran and the best one on equal stages, if that makes them faster."""
    for each in dict.fromkeys((found.now, found.best)):
        timeline = simulate(each.schedule, evened(found.cost_of(each.schedule)))
        if timeline.makespan < (1 - NOTABLE) * each.timeline.makespan:
            yield Candidate(replace(each.schedule, name=f"{each.schedule.name}, equal stages"), timeline, fits=True)


def _nearest(schedule: Schedule) -> Nearest | None:
    found = []
    for each in schedules_on(schedule.placement, schedule.num_microbatches, schedule.slices):
        mine, other = schedule.without_pairs(), each.without_pairs()
        if has_halves(mine) != has_halves(other):
            mine, other = without_halves(mine), without_halves(other)
        moves = [len(difference.moves) for difference in differences(mine, other) if difference is not None]
        found.append(Nearest(each.name, sum(moves)))
    return min(found, key=lambda each: each.moved, default=None)
