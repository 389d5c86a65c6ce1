"""Search: the best order for a placement, starting from its named schedules. Must not contain: how orders vary."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from time import perf_counter

from pipeflow.core.cost import CostModel, require_cost_model
from pipeflow.core.placement import Placement, require_placement, require_positive
from pipeflow.core.schedule import Schedule
from pipeflow.schedules.families import groups_on, schedules_on
from pipeflow.schedules.orders.exact import proved, require_solver
from pipeflow.schedules.orders.memory.search import improved_with_memory
from pipeflow.schedules.orders.memory.storage import MemoryKind, make_storage
from pipeflow.schedules.orders.problem import Objective, make_problem
from pipeflow.schedules.orders.search import Found, improved
from pipeflow.schedules.repeated import repeated_on

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
) -> Found:
    """Searches for a good order with split backwards, and proves how good it is. With `kinds`, it decides together with
    the order what is copied to the host and back, and what is computed again.

    It starts from every named schedule of the placement (`schedules.families.schedules_on`). So even with a small
    budget, the result is never worse than any of them that is within the cap. With `kinds` this includes the named
    schedules in which whole chunks are offloaded or computed again (`orders.memory.simple_uses`). With `candidates` the
    result is reproducible; otherwise it depends on how fast the machine is. Every stage takes the microbatches in the
    order of their numbers, also if they differ (`CostModel.microbatch_factors`).

    Args:
        placement: which rank holds which stage. It must have one path.
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

    Raises UsageError for a placement of two paths, and for a stage without a cost. Also raises it for a cap under which
    a rank cannot keep one microbatch with split backwards; the error names the smallest cap that works. With `kinds`,
    the error says what the order keeps that was found to keep least. Also raises it for a `start` that is incomplete or
    has another placement or other microbatches, for unknown kinds, and for offload if the costs have no time of a copy.
    """
    require_placement(placement)
    require_cost_model(cost)
    require_positive(microbatches=microbatches)
    began, begin = perf_counter(), (*schedules_on(placement, microbatches), *start)
    caps = memory_cap, bytes_cap
    storage = make_storage(placement, microbatches, cost, kinds, *caps, objective) if kinds else None
    if storage is None or caps == (None, None):
        problem = make_problem(placement, microbatches, cost, *caps, objective)
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
