"""Exact: the best order of a small case, by OR-tools' CP-SAT, an optional dependency loaded only then."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import ceil, floor, isinf
from time import perf_counter
from typing import Any

from pipeflow.core.analysis.simulation import simulate
from pipeflow.core.cost import CostModel, pairing_of
from pipeflow.core.distributions import install
from pipeflow.core.errors import UsageError
from pipeflow.schedules.orders.list_scheduling import run_times
from pipeflow.schedules.orders.lower_bounds import Bounds, bounds
from pipeflow.schedules.orders.problem import Operations, Problem, numbered, to_schedule, to_sequences
from pipeflow.schedules.orders.search import Found, fits, measured

SCALES = (1, 10, 100, 1_000, 100_000)  # the first that makes all times whole numbers, else the last
UNITS = 1_000_000  # of memory that a rank has room for
FUZZ = 1e-6  # of a unit, what arithmetic may have lost


def require_solver() -> Any:
    """The module of OR-tools' CP-SAT. Raises UsageError if OR-tools is not installed."""
    try:
        from ortools.sat.python import cp_model
    except ImportError as error:
        raise UsageError(f"exact needs OR-tools: {install('exact')}") from error
    return cp_model


def proved(problem: Problem, cost: CostModel, found: Found, *, deadline: float, workers: int) -> Found:
    """`found`, improved by the solver until it is proved best or `deadline` has passed, a time of `perf_counter`."""
    cp_model, objective = require_solver(), problem.objective
    begun = to_sequences(found.schedule)
    is_beyond = bool(problem.factors or (pairing_of(cost).hides and found.schedule.has_pairs))
    if is_beyond or found.gap < 1e-9 or not all(fits(problem, rank, each) for rank, each in enumerate(begun)):
        return found
    scale = _scale(problem)
    model, begins = _model(cp_model, problem, bounds(problem), begun, scale)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = max(deadline - perf_counter(), 0.0)
    solver.parameters.num_workers = workers
    solved = solver.solve(model) in (cp_model.OPTIMAL, cp_model.FEASIBLE)
    schedule, timeline = found.schedule, found.timeline
    if solved:
        sequences = _read(problem, [[solver.value(begin) for begin in row] for row in begins])
        sound = (
            all(fits(problem, rank, sequence) for rank, sequence in enumerate(sequences))
            and run_times(problem, sequences) is not None
        )
        solution = to_schedule(schedule.name, problem, sequences) if sound else schedule
        schedule, timeline = min(
            (schedule, timeline), (solution, simulate(solution, cost)), key=lambda pair: measured(pair[1], objective)
        )
    bound = max(found.lower_bound, solver.best_objective_bound / scale)
    return Found(schedule, timeline, min(bound, measured(timeline, objective)), objective)


def _model(
    cp_model: Any, problem: Problem, known: Bounds, sequences: Sequence[Operations], scale: float
) -> tuple[Any, list[list[Any]]]:
    """The model of the least objective, with the starts of `sequences` as a hint; and per operation and microbatch, the
    variable of its start. A rank whose start is known begins then; for another one the solver may choose, which can
    only make its bound smaller.
    """
    durations, delays = ([_down(time, scale) for time in times] for times in (problem.durations, problem.delays))
    times = run_times(problem, sequences)
    assert times is not None  # a search found them
    best = times.candidate(problem, sequences).objective
    hops = 1 + known.starts.count(None)  # a rank whose start is not known begins once another one has begun
    latest = ceil((max(start or 0.0 for start in known.starts) + hops * (best + max(problem.delays))) * scale)
    model = cp_model.CpModel()
    begins = [
        [model.new_int_var(0, latest, "") for _ in problem.places[operation // 3]]
        for operation in range(len(durations))
    ]
    for operation, row in enumerate(begins):
        for one, following in pairwise(row):
            model.add(following >= one + durations[operation])
        source = problem.source[operation]
        for maker, user in zip(begins[source], row, strict=True) if source >= 0 else ():
            model.add(user >= maker + durations[source] + delays[operation])
    objective = model.new_int_var(_down(known.objective, scale), ceil(best * scale), "objective")
    for rank, stages in enumerate(problem.stages):
        operations = [3 * stage + half for stage in stages for half in range(3)]
        model.add_no_overlap(
            model.new_fixed_size_interval_var(begin, durations[operation], "")
            for operation in operations
            for begin in begins[operation]
        )
        _keep_within(model, problem, rank, begins, durations)
        start = known.starts[rank]
        first = begins[operations[0]][0] if start is None else ceil(start * scale - FUZZ)
        for operation in operations[2::3]:
            model.add(objective >= begins[operation][-1] + durations[operation] - first)
    model.minimize(objective)
    for sequence, row in zip(sequences, times.starts, strict=True):
        for (operation, microbatch), begin in zip(numbered(sequence), row, strict=True):
            model.add_hint(begins[operation][microbatch], _down(begin, scale))
    return model, begins


def _keep_within(model: Any, problem: Problem, rank: int, begins: list[list[Any]], durations: list[int]) -> None:
    """At no time more kept than the rank has room for. Amounts are rounded down to whole numbers of a small unit, so
    that the bound holds.
    """
    memory, stages, room = problem.memory, problem.stages[rank], problem.memory.room[rank]
    if isinf(room):
        return
    if len(stages) == 1 and not memory.at_end[3 * stages[0] + 2]:  # in order, so each waits for one other alone
        (stage,) = stages
        forwards, backwards = begins[3 * stage], begins[3 * stage + 1]
        for backward, forward in zip(backwards, forwards[problem.most_alive(stage) :], strict=False):
            model.add(forward >= backward + durations[3 * stage + 1])
        return
    times, changes = [], []
    for stage in stages:
        saved, deferred = (
            floor(amount / room * UNITS) for amount in (memory.at_start[3 * stage], -memory.at_end[3 * stage + 2])
        )
        for half, change in enumerate((saved, deferred - saved, -deferred)):
            operation = 3 * stage + half
            times += [begin + (durations[operation] if half else 0) for begin in begins[operation]]
            changes += [change] * len(begins[operation])
    model.add_reservoir_constraint(times, changes, 0, UNITS)


def _scale(problem: Problem) -> float:
    times = (*problem.durations, *problem.delays)
    whole = (scale for scale in SCALES if all(abs(time * scale - round(time * scale)) < FUZZ for time in times))
    return next(whole, SCALES[-1] / max(max(times), 1e-9))


def _down(time: float, scale: float) -> int:
    return floor(time * scale + FUZZ)


def _read(problem: Problem, begins: list[list[int]]) -> list[Operations]:
    """The sequences of a solution; what takes no time comes first of what begins together."""
    sequences = []
    for stages in problem.stages:
        operations = [3 * stage + half for stage in stages for half in range(3)]
        order = sorted(
            (begin, problem.durations[operation] > 0, operation)
            for operation in operations
            for begin in begins[operation]
        )
        sequences.append([operation for _, _, operation in order])
    return sequences
