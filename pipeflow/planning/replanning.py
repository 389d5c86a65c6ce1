"""Replanning: schedules under the costs that a measured step shows. Must not contain: measuring, or how the result is
shown.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import fmean

from pipeflow.core.analysis.difference import has_halves
from pipeflow.core.analysis.idle_time import pauses
from pipeflow.core.analysis.measured_step import executed_schedule, measured_costs
from pipeflow.core.analysis.simulation import simulate
from pipeflow.core.cost import CostModel
from pipeflow.core.dataflow import Stream
from pipeflow.core.errors import UsageError
from pipeflow.core.schedule import Schedule
from pipeflow.core.timeline import Timeline
from pipeflow.schedules.families import schedules_on
from pipeflow.schedules.order_search import search

CANDIDATES = 1000  # orders that the search tries
MARGIN = 1e-9  # by which activations may differ and be the same


@dataclass(frozen=True, slots=True)
class Candidate:
    """A schedule under measured costs.

    Attributes:
        schedule: has the measured step's placement and microbatches.
        timeline: its simulation, in the unit of the measured step.
        fits: whether each rank keeps at most as many activations as in the measured step.
    """

    schedule: Schedule
    timeline: Timeline
    fits: bool


@dataclass(frozen=True, slots=True)
class Replan:
    """The result of `replan`.

    Attributes:
        measured: the step that was measured.
        cost: the costs that it shows.
        cost_in_halves: the costs for orders that split backwards; they differ if the measured step ran them whole.
        now: the schedule that ran, simulated under these costs.
        candidates: the other schedules. Those that keep no more activations come first; both groups are sorted by their
            time.
    """

    measured: Timeline
    cost: CostModel
    cost_in_halves: CostModel
    now: Candidate
    candidates: tuple[Candidate, ...]

    @property
    def best(self) -> Candidate:
        """The fastest schedule that keeps no more activations; the one that ran if no other is faster."""
        fitting = [each for each in self.candidates if each.fits]
        return min([self.now, *fitting], key=lambda each: each.timeline.makespan)

    def cost_of(self, schedule: Schedule) -> CostModel:
        """The costs of an order."""
        return self.cost_in_halves if has_halves(schedule) else self.cost

    def gain(self, candidate: Candidate) -> float:
        """The part of the planned step time that the candidate saves."""
        return 1 - candidate.timeline.makespan / self.now.timeline.makespan


def replan(measured: Timeline, *, candidates: int = CANDIDATES) -> Replan:
    """Plans a step again from its measured timeline. It simulates every named schedule with the same placement, and the
    best order that a search finds within the activations that the step kept. Microbatches have the factors that the
    step shows. If it ran in slices, named schedules with as many are simulated alone.

    Args:
        measured: a timeline of `execute_pipeline(..., trace=True)`.
        candidates: how many orders the search tries.

    Raises UsageError for a timeline without backwards.
    """
    ran = executed_schedule(measured)
    if ran.is_forward_only:
        raise UsageError("the measured step has no backwards: trace a step of training")
    cost = measured_costs(measured, late_apart=True, by_microbatch=True)
    reduces = Stream.REDUCE in measured.streams
    now = _candidate(ran, cost, None)
    halved = cost if has_halves(ran) else _with_pauses(measured, cost)
    named = [_like(each, reduces) for each in schedules_on(ran.placement, ran.num_microbatches, ran.slices)]
    found = [_candidate(each, halved if has_halves(each) else cost, now.timeline) for each in named]
    if len(ran.placement.paths) == ran.slices == 1:
        cap = now.timeline.peak_activations
        order = search(ran.placement, ran.num_microbatches, halved, memory_cap=cap, candidates=candidates)
        schedule = _like(order.schedule, reduces)
        found.append(_candidate(schedule, halved if has_halves(schedule) else cost, now.timeline))
    found.sort(key=lambda each: (not each.fits, each.timeline.makespan))
    return Replan(measured, cost, halved, now, tuple(found))


def _with_pauses(measured: Timeline, cost: CostModel) -> CostModel:
    """The costs if backwards run in halves, and in the measured step they ran whole: the second half is an action more,
    before which the engine works as before others.
    """
    found = [pause for _, pause in pauses(measured, lambda link: cost.link(*link).latency)]
    more = measured.slices * fmean(found or [0.0])
    return replace(cost, backward_weight=tuple(time + more for time in cost.backward_weight))


def _like(schedule: Schedule, reduces: bool) -> Schedule:
    return schedule.with_reductions() if reduces else schedule


def _candidate(schedule: Schedule, cost: CostModel, now: Timeline | None) -> Candidate:
    timeline = simulate(schedule, cost)
    kept = timeline.peak_activations
    fits = now is None or all(mine <= theirs + MARGIN for mine, theirs in zip(kept, now.peak_activations, strict=True))
    return Candidate(schedule, timeline, fits)
