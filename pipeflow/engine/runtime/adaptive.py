"""Adaptation: gives the steps of a Pipeline a better order when they begin to take other times. Must not contain: how
steps are measured, and how orders are found.
"""

from __future__ import annotations

import logging
from math import inf, log
from typing import Any

from pipeflow.core.action import Kind
from pipeflow.core.analysis.measured_step import measured_costs
from pipeflow.core.analysis.simulation import simulate
from pipeflow.core.cost import CostModel, Link
from pipeflow.core.errors import UsageError
from pipeflow.core.schedule import Schedule, require_unsliced
from pipeflow.core.timeline import Timeline
from pipeflow.engine.parallel.context import Context
from pipeflow.engine.parallel.transport.agreement import all_gather_object
from pipeflow.schedules.orders.lower_bounds import bounds
from pipeflow.schedules.orders.problem import HALVES, make_problem
from pipeflow.schedules.orders.search import improved

LOG = logging.getLogger("pipeflow")
CHANGE = 1.1  # how many times as long or as short a step is that takes another time
GAIN = 0.03  # the part of a step that another order must save
TRIED = 10_000  # actions in all orders that a search tries
LONGEST = 1024  # steps without a measurement, after measurements in vain

# Theory of operation
#
# A step whose time has changed is followed by a traced one. If that differs, too, its costs decide: a step that is slow
# by chance changes nothing. An order must save `GAIN` in the simulation, and is given back if its steps take longer
# than the traced one. After each measurement in vain, the next one comes later.
#
# The first step compiles. The second one differs from the usual time, which is zero then. So the first order is found
# from the third step.


class Adaptation:
    """The order of the training steps of a Pipeline. All ranks call its methods together, with the same values.

    Args:
        given: the schedule of the Pipeline.
        context: this rank's context.
        over_batch: whether the loss is computed over the whole batch at once.

    Attributes:
        schedule: the schedule of the next step.
        traces: whether the next step is traced.

    Raises UsageError for such a loss, and for a schedule with slices, pairs, or other actions than forwards, backwards
    and reductions.
    """

    def __init__(self, given: Schedule, context: Context, *, over_batch: bool = False) -> None:
        require_unsliced(given, "launch(adaptive=True)")
        if over_batch:
            raise UsageError(
                'loss_over="batch" needs all forwards before the first backward, and launch(adaptive=True) may change '
                "their order: launch without adaptive"
            )
        if given.has_pairs or given.kinds - {*HALVES, Kind.B, Kind.R}:
            raise UsageError(
                f"launch(adaptive=True) searches orders of forwards, backwards and reductions alone, and schedule "
                f"{given.name!r} has pairs or other actions: take another schedule, or launch without adaptive"
            )
        self._given, self._context = given, context
        self._room = simulate(given, CostModel.even(given.placement)).peak_activations
        self.forget()

    def forget(self) -> None:
        """Begins again with the given schedule: after a failure, ranks may have seen other steps."""
        self.schedule, self.traces = self._given, False
        self._usual: float | None = 0.0  # seconds of a step; None: not known yet
        self._seen: list[float] = []
        self._left, self._pause = 1, 1  # steps that are ignored now, and after the next measurement in vain
        self._before: tuple[Schedule, float] | None = None  # the order before this one, and the seconds of its step
        self._work: tuple[float, ...] = ()  # of each rank, when it was measured last

    def saw(self, seconds: float, timeline: Timeline | None) -> None:
        """Call after a whole step of `schedule`.

        Args:
            seconds: the time of the step on the slowest rank.
            timeline: the measured step if it was traced.
        """
        traced, self.traces = self.traces and timeline is not None, False
        if self._left:
            self._left -= 1
        elif self._usual is None:
            self._learn(seconds)
        elif not self._usual / CHANGE <= seconds <= self._usual * CHANGE:
            if traced and timeline is not None:
                self._plan(seconds, timeline)
            else:
                self.traces = True
        elif traced:
            self._rest()

    def _learn(self, seconds: float) -> None:
        """Learns the usual time under a new order from two steps. Gives the order back if it takes longer."""
        self._seen.append(seconds)
        if len(self._seen) < 2:
            return
        self._usual, self._seen = min(self._seen), []
        before, self._before = self._before, None
        if before is not None and self._usual > before[1]:
            self._log("%r takes %.1f ms, not less than before: going back", self.schedule.name, 1e3 * self._usual)
            self.schedule, self._usual = before[0], None
            self._rest()

    def _rest(self) -> None:
        """Ignores some steps after a measurement in vain, each time more."""
        self._left, self._pause = self._pause, min(2 * self._pause, LONGEST)

    def _plan(self, seconds: float, timeline: Timeline) -> None:
        """Decides about the order under the costs that the traced step shows."""
        self._context.alarm.expect_slow()
        now, given = self.schedule.without_reductions(), self._given.without_reductions()
        cost = self._slowest(measured_costs(timeline, late_apart=True), now)
        problem = make_problem(now.placement, now.num_microbatches, cost, self._room)
        lasts, best = simulate(now, cost).makespan, now
        if 1 - bounds(problem).objective / lasts > GAIN:
            tried = max(10, TRIED // sum(map(len, now.rows)))
            name = f"{given.name} (adapted)"
            best = improved(problem, cost, [given, now], deadline=inf, candidates=tried, name=name).schedule
        last = simulate(best, cost).makespan
        if 1 - last / (lasts_given := simulate(given, cost).makespan) <= GAIN:
            best, last = given, lasts_given
        why = f"a step takes {1e3 * seconds:.1f} ms{self._changed(problem.work)}"
        self._work, self._usual = problem.work, None
        if 1 - last / lasts <= GAIN:
            self._log("%s: no order saves more than %.0f%%, so %r stays", why, 100 * GAIN, self.schedule.name)
            self._rest()
            return
        self._log("%s: %r is to save %.1f%%", why, best.name, 100 * (1 - last / lasts))
        self._before, self._left, self._pause = (self.schedule, seconds), 1, 1
        self.schedule = best.with_reductions() if Kind.R in self._given.kinds else best

    def _changed(self, work: tuple[float, ...]) -> str:
        """Says which rank computes for another time than when it was measured last."""
        ratios = [(now or 1.0) / (before or 1.0) for now, before in zip(work, self._work, strict=False)]
        change, rank = max(((abs(log(ratio)), rank) for rank, ratio in enumerate(ratios)), default=(0.0, 0))
        return f", and rank {rank} of the pipeline computes for {ratios[rank]:.2f} x its time before" if change else ""

    def _slowest(self, cost: CostModel, now: Schedule) -> CostModel:
        """The costs of the pipeline whose step takes longest, which all ranks take: the other pipelines wait for it."""
        links = tuple((*pair, link.latency) for pair, link in cost.links.items())
        everyone: list[Any] = [(cost.forward, cost.backward_input, cost.backward_weight, cost.latency, links)]
        if self._context.world.size > self._context.transport.size:
            everyone = all_gather_object(self._context.world, everyone[0])
        costs = [
            CostModel(forward, first, second, latency, links={(one, other): Link(time) for one, other, time in links})
            for forward, first, second, latency, links in dict.fromkeys(everyone)
        ]
        return max(costs, key=lambda each: simulate(now, each).makespan)

    def _log(self, text: str, *values: object) -> None:
        if self._context.rank == 0:
            LOG.info(f"adaptive: {text}", *values)
