"""Search: the best order for a placement, starting from its named schedules. Must not contain: how orders vary."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from time import perf_counter

from pipeflow.core.cost import CostModel
from pipeflow.core.placement import Placement
from pipeflow.core.schedule import Schedule
from pipeflow.orders.exact import proved, require_solver
from pipeflow.orders.problem import Objective, make_problem
from pipeflow.orders.search import Found, improved
from pipeflow.schedules.families import schedules_on

CANDIDATES = 1000  # of the search that the solver starts from


def search(
    placement: Placement,
    microbatches: int,
    cost: CostModel,
    *,
    objective: Objective = "makespan",
    memory_cap: float | Sequence[float] | None = None,
    bytes_cap: float | Sequence[float] | None = None,
    budget: float = 10.0,
    candidates: int | None = None,
    start: Iterable[Schedule] = (),
    name: str = "zb-auto",
) -> Found:
    """Searches for a good order with split backwards, and proves how good it is.

    It starts from every named schedule of the placement (`schedules.families.schedules_on`), so the result is never
    worse than one of them that keeps within the cap, however small the budget. With `candidates` the result is
    reproducible; otherwise it depends on how fast the machine is.

    Args:
        placement: which rank has which stage; it has one path.
        microbatches: their number.
        cost: times per stage, of transfers, and bytes.
        objective: what to make small. "makespan" is the time of a step that ends with a barrier, as steps with an
            ordinary optimizer do. "span" is the papers' measure, in which ranks may begin one after the other. Of
            orders that are equal in one the search takes the one that is better in the other.
        memory_cap: the most activations that a rank may keep, as `Timeline.peak_activations` counts them, in
            microbatches of a rank's whole share of the model; one number, or one per rank.
        bytes_cap: instead of it, the most bytes, as `Timeline.peak_bytes` counts them: what forwards save and what
            waiting weight-gradient halves hold. Weights, gradients and the optimizer's state are not in it.
        budget: seconds to search for; it ends sooner when an order is proved best.
        candidates: how many orders to try, instead of a time.
        start: more schedules to begin with. The result is never worse than those of them that keep within the cap.
        name: of the schedule.

    Raises UsageError for a placement of two paths, a stage without a cost, a cap under which a rank cannot keep one
    microbatch with split backwards (with the least that it needs), and a `start` of another placement, of other
    microbatches, or incomplete.
    """
    problem = make_problem(placement, microbatches, cost, memory_cap, bytes_cap, objective)
    deadline = perf_counter() + budget
    begin = (*schedules_on(placement, microbatches), *start)
    return improved(problem, cost, begin, deadline=deadline, candidates=candidates, name=name)


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
    """Improves what `search` finds by a solver, until it is proved best or `budget` seconds have passed; arguments and
    result are those of `search`, and the solver uses `workers` threads. Up to about 400 actions a proof takes seconds
    or minutes.

    The solver chooses the starts of all actions, for every stage in microbatch order (see `orders.lower_bounds.arcs`).
    It computes in whole numbers of a small unit, to which times are rounded down, so that its bound holds. It knows no
    pairs that overlap, and no whole backwards where the halves would keep too much: if what `search` found has these,
    it is returned as it is.

    Source of the formulation: arXiv 2401.10241, appendix on the integer program, with CP-SAT's intervals for its pairs
    of orders and its reservoir for memory.

    Raises UsageError where `search` does, and when OR-tools is not there.
    """
    require_solver()
    deadline = perf_counter() + budget
    problem = make_problem(placement, microbatches, cost, memory_cap, bytes_cap, objective)
    begin = (*schedules_on(placement, microbatches), *start)
    found = improved(problem, cost, begin, deadline=deadline, candidates=CANDIDATES, name="zb-auto")
    return proved(problem, cost, found, deadline=deadline, workers=workers)
