"""Searches that start from named schedules: for the best order of a placement, and for that of a batch whose samples
differ. Must not contain: how orders vary.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence, Sized
from dataclasses import replace
from functools import lru_cache
from math import isfinite
from numbers import Real
from time import perf_counter
from typing import Any

from pipeflow.core.cost import CostModel, require_cost_model
from pipeflow.core.errors import UsageError
from pipeflow.core.factors import is_table
from pipeflow.core.placement import Placement, require_placement, require_positive
from pipeflow.core.schedule import Schedule
from pipeflow.schedules.families import groups_on, repeated_on, schedules_on
from pipeflow.schedules.orders.batch_order import BatchOrder, Rerun, ordered
from pipeflow.schedules.orders.exact import proved, require_solver
from pipeflow.schedules.orders.memory_search import improved_with_memory
from pipeflow.schedules.orders.problem import Objective, make_problem
from pipeflow.schedules.orders.search import Found, improved
from pipeflow.schedules.orders.spilling import MemoryKind, make_storage

CANDIDATES = 1000  # of the search that the solver starts from
PLAIN = 0.2  # the share of a budget for orders without kinds that save memory


def search(
    placement: Placement,
    microbatches: int,
    cost: CostModel,
    *,
    objective: Objective = "makespan",
    memory_cap: float | Sequence[float] | None = None,
    bytes_cap: float | Sequence[float] | None = None,
    kinds: Collection[MemoryKind] = (),
    budget: float = 10.0,
    candidates: int | None = None,
    start: Iterable[Schedule] = (),
    name: str = "zb-auto",
    slices: int = 1,
) -> Found:
    """Searches for a good order with split backwards, and proves how good it is. With `kinds`, it decides together with
    the order what is copied to the host and back, and what is computed again. With `slices`, it orders the slices of
    microbatches of a causal model.

    It starts from every named schedule of the placement (`schedules.families.schedules_on`). So even with a small
    budget, the result is never worse than any of them that is within the cap. With `kinds` this includes the named
    schedules in which whole chunks are offloaded or computed again (`orders.memory_search`). With `candidates` the
    result is reproducible; otherwise it depends on how fast the machine is. Every stage of a path takes the
    microbatches in the same order. That is the order of their numbers unless they differ
    (`CostModel.microbatch_factors`), when the search chooses it, or starts from a schedule in which one overtakes
    another.

    Args:
        placement: which rank holds which stage. With `kinds` it must have one path.
        microbatches: number of microbatches.
        cost: times of stages and transfers, and bytes.
        objective: the measure to minimize. "makespan" is the time of a step that ends with a barrier, as steps with an
            ordinary optimizer do. "span" is the measure of the papers, in which ranks may begin one after the other.
            Orders with equal values are compared by the other measure.
        memory_cap: the most activations that a rank may keep, in microbatches of a rank's whole share of the model, as
            `Timeline.peak_activations` counts them. One number, or one per rank.
        bytes_cap: instead of `memory_cap`, the most bytes that a rank may keep, as `Timeline.peak_bytes` counts them:
            for forwards and for waiting weight-gradient halves. Weights, gradients and the optimizer's state do not
            count.
        kinds: what may save memory where there is a cap: "offload" (copies to the host, for which the costs have a
            time), "recompute", or both.
        budget: the most seconds to search; the search ends sooner if an order is proved to be the best.
        candidates: the number of orders to try, instead of a time; with `kinds`, as many more with these.
        start: more schedules to begin with. The result is never worse than any of them that is within the cap.
        name: of the schedule.
        slices: into how many slices each microbatch is cut. On a stage, forwards take them in order and backwards begin
            with the last one. `CostModel` has the share of attention, or where slices end.

    Raises UsageError for a stage without a cost, and for a cap under which a rank cannot keep one microbatch with split
    backwards; the error names the smallest cap that works. With `kinds`, the error says what the order keeps that was
    found to keep least. Also raises it for a `start` that is incomplete or has another placement or other microbatches,
    for unknown kinds, for offload if the costs have no time of a copy, and for `kinds` of several paths or with slices.
    Also raises it for a `start` with other slices, and if ranks with stages of several paths, or with slices of several
    stages, wait for each other in all orders within the cap that were tried.
    """
    require_placement(placement)
    require_cost_model(cost)
    require_positive(microbatches=microbatches, slices=slices)
    if kinds and slices > 1:
        raise UsageError("a search with kinds takes no slices: leave out kinds, or make it slices=1")
    began, begin = perf_counter(), (*schedules_on(placement, microbatches, slices), *start)
    caps = memory_cap, bytes_cap
    storage = make_storage(placement, microbatches, cost, kinds, *caps, objective) if kinds else None
    if storage is None or caps == (None, None):
        problem = make_problem(placement, microbatches, cost, *caps, objective, slices)
        return improved(problem, cost, begin, deadline=began + budget, candidates=candidates, name=name)
    known = None
    if storage.holds_microbatches:
        deadline = began + budget * PLAIN
        known = improved(storage.capped, cost, begin, deadline=deadline, candidates=candidates, name=name)
    more = *groups_on(placement, microbatches), *repeated_on(placement, microbatches)
    return improved_with_memory(
        storage, cost, (*begin, *more), known=known, deadline=began + budget, candidates=candidates, name=name
    )


def exact(
    placement: Placement,
    microbatches: int,
    cost: CostModel,
    *,
    objective: Objective = "makespan",
    memory_cap: float | Sequence[float] | None = None,
    bytes_cap: float | Sequence[float] | None = None,
    budget: float = 60.0,
    start: Iterable[Schedule] = (),
    workers: int = 1,
) -> Found:
    """Improves the result of `search` with a solver, until it is proved to be the best or `budget` seconds have passed.
    Arguments and result are those of `search`, and the solver uses `workers` threads. For up to about 400 actions a
    proof takes seconds or minutes.

    The solver chooses the starts of all actions, for every stage in microbatch order (see `orders.lower_bounds.arcs`).
    It computes with integers: times are rounded down to a small unit, so that its bound holds. It does not support
    microbatches that differ, pairs that overlap, nor whole backwards whose halves would keep too much. If the result of
    `search` has these, it is returned as it is.

    Source of the formulation: arXiv 2401.10241, appendix on the integer program, with CP-SAT's intervals for its pairs
    of orders and its reservoir for memory.

    Raises UsageError as `search` does, and if OR-tools is not installed.
    """
    require_solver()
    deadline = perf_counter() + budget
    problem = make_problem(placement, microbatches, cost, memory_cap, bytes_cap, objective)
    begin = (*schedules_on(placement, microbatches), *start)
    found = improved(problem, cost, begin, deadline=deadline, candidates=CANDIDATES, name="zb-auto")
    return proved(problem, cost, found, deadline=deadline, workers=workers)


def order_for(
    lengths: Sequence[float] | Sequence[Sequence[float]],
    placement: Placement,
    cost: CostModel,
    microbatches: int,
    quadratic: float = 0.0,
    bytes_cap: float | Sequence[float] | None = None,
    budget: float = 0.05,
    *,
    padded: bool = False,
    slices: Iterable[int] = (1,),
    among: Iterable[Schedule] | None = None,
) -> BatchOrder:
    """Divides a batch into microbatches of like cost, puts them in order, and chooses the order of actions.

    A sample of length l costs l + `quadratic` l^2, and a microbatch the sum over its samples. The order of actions is
    that of the best named schedule of the placement, or one for this batch if it is shorter by more than 1 %: large
    microbatches go first or, if this keeps more than `bytes_cap`, a search decides. Of named schedules that take the
    same time, the one that keeps least is chosen.

    The result depends on the arguments alone. Every rank that has the same ones finds the same order.

    Args:
        lengths: per sample of the batch, its length, such as the number of its tokens. Or such a list per stage, if an
            encoder has other lengths than a decoder: there a sample may have the length 0.
        placement: which rank holds which stage.
        cost: the times and bytes of a mean microbatch.
        microbatches: number of microbatches.
        quadratic: the cost of attention: how much more a sample costs per square of its length.
        bytes_cap: the most bytes that a rank may keep, as `Timeline.peak_bytes` counts them: one number, or one per
            rank.
        budget: seconds to plan on a usual processor. It is counted in actions that are tried, not in time.
        padded: whether the samples of a microbatch are padded to the longest. The cost of a microbatch is then that of
            its longest sample, times their number, and samples of like length come together.
        slices: into how many slices of a sequence named schedules may cut microbatches, such as (1, 4, 8) for a causal
            model: long ones then hold up no others. No sample is shorter than the number of slices that is chosen.
        among: the only schedules to choose from. None: the named ones of the placement, and orders for the batch.

    Raises UsageError for lengths that are not positive, for fewer samples than microbatches, for costs of another
    number of stages, and for a cap that no order keeps.

    >>> from pipeflow import CostModel, Placement
    >>> placement = Placement.linear(2)
    >>> found = order_for([700, 90, 80, 60, 50, 420, 300], placement, CostModel.even(placement), microbatches=3)
    >>> found.groups
    ((5, 3), (0,), (6, 1, 2, 4))
    >>> [round(factor, 2) for factor in found.cost.microbatch_factors]
    [0.85, 1.24, 0.92]
    """
    if not budget > 0:
        raise UsageError(f"budget must be positive, got {budget}")
    require_placement(placement)
    require_cost_model(cost)
    costs = _costs(lengths, quadratic, microbatches, placement.num_stages)
    numbers, alike = _numbers_of_slices(slices), replace(cost, microbatch_factors=())
    rows: Sequence[Any] = lengths if is_table(lengths) else [lengths]
    if not cost.attention and not cost.slice_ends:
        cost = replace(cost, attention=1 - sum(map(sum, rows)) / sum(map(sum, costs)))
    reruns = _reruns(placement, microbatches, alike, numbers) if among is None else _rerun_of(tuple(among), alike)
    shortest = max(1, min(map(min, rows)))
    reruns = tuple(rerun for rerun in reruns if rerun.schedule.slices <= shortest) or reruns
    for schedule in (rerun.schedule for rerun in reruns):
        if schedule.placement != placement or schedule.num_microbatches != microbatches:
            raise UsageError(f"schedule {schedule.name!r} has another placement or other microbatches than the batch")
    searches = among is None and 1 in numbers
    return ordered(costs, cost, reruns, padded=padded, bytes_cap=bytes_cap, budget=budget, searches=searches)


@lru_cache(maxsize=8)
def _reruns(placement: Placement, microbatches: int, cost: CostModel, slices: tuple[int, ...]) -> tuple[Rerun, ...]:
    """The different named schedules of a placement, or one that is searched for if there are none."""
    found = [schedule for number in slices for schedule in schedules_on(placement, microbatches, number)]
    different = {schedule.rows: schedule for schedule in found}
    named = different.values() or [search(placement, microbatches, cost, candidates=100).schedule]
    return tuple(Rerun(schedule, cost) for schedule in named)


def _numbers_of_slices(slices: Iterable[int]) -> tuple[int, ...]:
    numbers = tuple(slices) if isinstance(slices, Iterable) else ()
    if not numbers or any(type(number) is not int or number < 1 for number in numbers):
        raise UsageError(f"slices must be whole numbers of 1 or more, such as (1, 4), got {slices}")
    return tuple(sorted({*numbers}))


@lru_cache(maxsize=8)
def _rerun_of(schedules: tuple[Schedule, ...], cost: CostModel) -> tuple[Rerun, ...]:
    if not schedules:
        raise UsageError("among has no schedule: pass some, or leave it out")
    return tuple(Rerun(schedule, cost) for schedule in schedules)


def _costs(lengths: Sequence[Any], quadratic: float, microbatches: int, stages: int) -> list[list[float]]:
    """The cost of each sample, in one row for all stages or in one for each."""
    require_positive(microbatches=microbatches)
    if isinstance(lengths, str) or not isinstance(lengths, Sized):
        raise UsageError(f"lengths must be a list with the length of each sample, got {lengths!r}")
    rows: Sequence[Any] = lengths if is_table(lengths) else [lengths]
    if len(rows) not in (1, stages) or len({len(row) if isinstance(row, Sized) else 0 for row in rows}) != 1:
        raise UsageError(f"lengths per stage must be {stages} lists, one per stage, with the length of each sample")
    if len(rows[0]) < microbatches:
        raise UsageError(
            f"a batch of {len(rows[0])} samples cannot fill {microbatches} microbatches: use fewer of them"
        )
    for row in rows:
        for sample, length in enumerate(row):
            may_be_none = len(rows) > 1 and length == 0
            if not may_be_none and not (isinstance(length, Real) and isfinite(length) and float(length) > 0):
                raise UsageError(f"the length of sample {sample} must be positive, got {length}")
    if not all(map(any, rows)):
        raise UsageError("lengths per stage: on one stage all samples have the length 0: give that stage other lengths")
    if not (isfinite(quadratic) and quadratic >= 0):
        raise UsageError(f"quadratic must be finite and not negative, got {quadratic}")
    return [[length + quadratic * length * length for length in row] for row in rows]
