"""Orders that follow what steps cost: a rank becomes slow in mid-run. How much of the avoidable loss is back, after how
many steps? What does a step cost in which nothing happens?

4 processes whose stages sleep, in forwards and in both halves of backwards, so that cores are not what is measured.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import pipeflow
from benchmarks.measure import Times, alternate, paired, step_times
from benchmarks.processes import run_ranks
from benchmarks.replan import WIDTH, SleepStage
from benchmarks.report import Report
from benchmarks.task import Contender
from pipeflow.engine.parallel.context import Context, current_context
from pipeflow.engine.runtime.adaptive import GAIN

RANKS, MICROBATCHES, SECONDS = 4, 8, 0.012  # of F, I and W each of a rank's share of the model
BEFORE, AFTER = 8, 6  # steps before a rank changes, and after it
WITHIN = 3  # steps after which the loss should be back
KEPT, FORCE, BEST, ADAPTED = "kept", "in force", "best", "adapted"
CASES: dict[
    str, tuple[str, dict[int, float], dict[int, float]]
] = {  # the schedule of the script, and which rank is how slow, first and then
    "1f1b; rank 3 becomes 1.5 x": ("1f1b", {}, {3: 1.5}),
    "1f1b; rank 3 becomes 3 x": ("1f1b", {}, {3: 3.0}),
    "1f1b; rank 0 is 3 x, then rank 2 is 1.5 x": ("1f1b", {0: 3.0}, {2: 1.5}),
    "zb-h1; rank 3 becomes 2 x": ("zb-h1", {}, {3: 2.0}),
    "zb-h1; rank 0 is 2 x, then rank 3 is 2 x": ("zb-h1", {0: 2.0}, {3: 2.0}),
}


def run(rounds: int | None = None) -> Report:
    rounds = rounds or 5
    columns = ["", "kept ms", "in force ms", "best ms", "adapted ms", "back", "simulated", "back", "old steps"]
    title = f"adaptive: {RANKS} ranks, {MICROBATCHES} microbatches, F = I = W = {1e3 * SECONDS:g} ms, {rounds} rounds"
    report = Report("adaptive", title, columns, data={"cases": {}})
    ranks = run_ranks("adaptive:measure", RANKS, {"rounds": rounds}, deadline=1200)
    for case in CASES:
        _add(report, case, [each[case] for each in ranks])
    quiet = step_times([each["quiet"] for each in ranks])
    report.data["quiet"] = quiet
    report.notes += [
        f"a step in which nothing happens: {paired(quiet, ADAPTED, KEPT):.3f} x that without adaptive",
        "kept: under the schedule of the script; in force: under the order that had been adapted to the times before; "
        "best: under the order that a search finds for the new times; adapted: under the order after the change",
        "back: the part of in force - best that is back, or of kept - best if the order in force loses less than 3%; "
        "simulated: the same four orders under the true times, and back of these; old steps: those after the change "
        "until the last order",
        f"targets: 60% back within {WITHIN} steps; 1.00 x",
    ]
    return report


def _add(report: Report, case: str, results: list[Any]) -> None:
    times, simulated, old = step_times([each["times"] for each in results]), results[0]["simulated"], results[0]["old"]
    medians = {name: statistics.median(found) for name, found in times.items()}
    report.data["cases"][case] = {"seconds": times, "simulated": simulated, "steps": results[0]["steps"], "old": old}
    shown = [f"{1e3 * medians[name]:.0f}" for name in (KEPT, FORCE, BEST, ADAPTED)]
    promised = " ".join(f"{1e3 * simulated[name]:.0f}" for name in (KEPT, FORCE, BEST, ADAPTED))
    report.rows.append([case, *shown, _back(medians, simulated), promised, _back(simulated, simulated), str(old)])


def _back(times: dict[str, float], simulated: dict[str, float]) -> str:
    """The part of the avoidable loss that is back: of the order in force, or of the kept one if that loses nothing."""
    before = next((name for name in (FORCE, KEPT) if 1 - simulated[BEST] / simulated[name] > GAIN), None)
    if before is None:
        return "nothing to gain"
    return f"{(times[before] - times[ADAPTED]) / (times[before] - times[BEST]):.0%}"


def measure(rounds: int) -> dict[str, Any]:
    """On every rank: all cases, and steps in which nothing happens."""
    return {**{case: _changed(*each, rounds) for case, each in CASES.items()}, "quiet": _quiet(3 * rounds)}


def _changed(name: str, first: dict[int, float], then: dict[int, float], rounds: int) -> dict[str, Any]:
    """Steps before and after some ranks take other times, then the orders side by side."""
    context, model, step = _made(name, adaptive=True)
    adaptation = model.runner.adaptation
    assert adaptation is not None
    force, orders, steps = adaptation.schedule, list[pipeflow.Schedule](), list[float]()
    for number, factors in ((BEFORE, first), (AFTER, then)):
        for stage in model.chunks:
            stage.seconds = SECONDS / len(model.chunks) * factors.get(context.pipeline_rank, 1.0)  # type: ignore[assignment]  # a SleepStage
        force, orders = adaptation.schedule, []
        for _ in range(number):
            orders.append(adaptation.schedule)
            begin = time.monotonic()
            step()
            steps.append(time.monotonic() - begin)
    placement = model.schedule.placement
    times = tuple(SECONDS / len(model.chunks) * then.get(rank, 1.0) for rank in placement.paths[0])
    cost = pipeflow.CostModel(times, times, times)
    room = pipeflow.simulate(model.schedule, cost).peak_activations
    start = [model.schedule, force]
    best = pipeflow.search(placement, MICROBATCHES, cost, memory_cap=room, candidates=300, start=start).schedule
    found = {KEPT: model.schedule, FORCE: force, BEST: best, ADAPTED: adaptation.schedule}
    contenders = {each: Contender(each, partial(step, schedule), [model]) for each, schedule in found.items()}
    return {
        "times": alternate(contenders, rounds),
        "old": sum(each != adaptation.schedule for each in orders),
        "steps": steps,
        "simulated": {each: pipeflow.simulate(schedule, cost).makespan for each, schedule in found.items()},
    }


def _quiet(rounds: int) -> Times:
    """A schedule that is the best already, with and without adaptation."""
    contenders = {}
    for name, adaptive in ((KEPT, False), (ADAPTED, True)):
        _, model, step = _made("zb-h1", adaptive=adaptive)
        for _ in range(BEFORE):
            step()
        contenders[name] = Contender(name, step, [model])
    return alternate(contenders, rounds)


def _made(name: str, *, adaptive: bool) -> tuple[Context, pipeflow.Pipeline, Callable[..., object]]:
    """A Pipeline whose stages sleep, and a function that runs a step of it."""
    context = current_context()
    context.adaptive = adaptive
    torch.manual_seed(0)
    schedule = pipeflow.make_schedule(name, ranks=RANKS, microbatches=MICROBATCHES)
    chunks = len(schedule.placement.stages_of(context.pipeline_rank))
    stages = nn.ModuleList(SleepStage(SECONDS / chunks) for _ in range(chunks))
    model = pipeflow.Pipeline(stages, schedule, criterion=functional.mse_loss, tensor_shape=(2, WIDTH))
    batch = tuple(torch.randn(2, 2 * MICROBATCHES, WIDTH))

    def step(schedule: pipeflow.Schedule | None = None) -> object:
        return pipeflow.execute_pipeline(iter([batch]), model, schedule=schedule)

    return context, model, step
