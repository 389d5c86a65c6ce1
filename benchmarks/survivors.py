"""The schedule of the ranks that are left when one fails: how near is it to the least makespan, under which memory, and
does a step take what its simulation says? On ranks whose stages sleep in forwards and both halves of backwards.
"""

from __future__ import annotations

import statistics
import time
from functools import partial
from itertools import product
from math import ceil
from typing import Any

import torch

import pipeflow
from benchmarks.measure import alternate, step_times
from benchmarks.processes import run_ranks
from benchmarks.report import Report
from benchmarks.sleeping_halves import SleepingHalves
from benchmarks.task import Contender

SIZES = ((4, 4, 8), (8, 4, 16), (4, 8, 16))  # replicas, pipeline ranks, microbatches of each
CAPS = {"as 1F1B": (0, 0), "one more; two on ranks of the stage": (1, 2), "any": None}
BUDGET = 3.0  # seconds of a search
REPLICAS, RANKS, MICROBATCHES, SECONDS = 3, 2, 6, 0.05  # of stages that sleep
DEAD = (0, 3)


def run(rounds: int | None = None) -> Report:
    rounds = rounds or 5
    columns = [
        "ranks",
        "lost stage",
        "memory",
        "makespan",
        "least",
        "makespan / least",
        "step / simulated",
        "planned in s",
    ]
    title = f"survivors: a rank of several replicas fails, F = I = W, {rounds} rounds"
    report = Report("survivors", title, columns, data={"planned": {}, "seconds": {}})
    for (replicas, ranks, microbatches), memory in product(SIZES, CAPS):
        for stage in range(ranks):
            _add(report, replicas, ranks, microbatches, stage, memory)
    for dead in DEAD:
        results = run_ranks("survivors:measure", REPLICAS * RANKS - 1, {"dead": dead, "rounds": rounds}, deadline=240)
        times, simulated = step_times([each["times"] for each in results]), results[0]["simulated"]
        report.data["seconds"][dead] = {"steps": times, "simulated": simulated}
        for name, steps in times.items():
            step, units = statistics.median(steps), simulated[name] / SECONDS
            shown = [f"{REPLICAS} x {RANKS}, sleeping", str(dead % RANKS), name, f"{units:.0f}", "", ""]
            report.rows.append([*shown, f"{step / simulated[name]:.3f}", ""])
    report.notes += [
        "targets: makespan / least at most 1.03, with one microbatch more than 1F1B keeps, and two on ranks of the "
        "lost stage; step / simulated within 0.95 and 1.05",
        "least: the larger of 3 (M + P - 1), and 3 ceil(N M / (N - 1)) + s for a lost stage s, of N replicas of P "
        "ranks with M microbatches each. Under a cap more may be needed: a rank of stage 0 of 4 x 4 needs 7 forwards "
        "until its first backward arrives, and may keep 6",
    ]
    return report


def _add(report: Report, replicas: int, ranks: int, microbatches: int, stage: int, memory: str) -> None:
    whole = pipeflow.replicated(pipeflow.make_schedule("1f1b", ranks=ranks, microbatches=microbatches), replicas)
    caps = None
    if (more := CAPS[memory]) is not None:
        caps = [ranks - its + more[its == stage] for _ in range(replicas) for its in range(ranks)]
        del caps[stage]
    begin = time.perf_counter()
    found = pipeflow.without_ranks(whole, [stage], memory_cap=caps, budget=BUDGET)
    seconds = time.perf_counter() - begin
    least = max(3 * (microbatches + ranks - 1), 3 * ceil(replicas * microbatches / (replicas - 1)) + stage)
    makespan = found.timeline.makespan
    size = f"{replicas} x {ranks}, M {microbatches}"
    report.data["planned"][f"{size}, stage {stage}, {memory}"] = [makespan, least, max(found.timeline.peak_activations)]
    figures = [f"{makespan:.0f}", str(least), f"{makespan / least:.3f}", "", f"{seconds:.1f}"]
    report.rows.append([size, str(stage), memory, *figures])


def measure(dead: int, rounds: int) -> dict[str, Any]:
    """On every rank that is left: the times of the schedule without a rank, and of the lost work at the end of rows."""
    one = pipeflow.make_schedule("zb-h1", ranks=RANKS, microbatches=MICROBATCHES)
    cost = pipeflow.CostModel(*((SECONDS,) * RANKS for _ in range(3)))  # type: ignore[arg-type]  # three of times
    schedule = pipeflow.without_ranks(pipeflow.replicated(one, REPLICAS), [dead], cost=cost, candidates=200).schedule
    stage = SleepingHalves(1, SECONDS)
    model = pipeflow.Pipeline(stage, schedule, criterion=_mean, tensor_shape=(1, 1))
    samples = REPLICAS * MICROBATCHES
    batch = torch.ones(samples, 1), torch.ones(samples, 1)

    def step() -> pipeflow.Output:
        return pipeflow.execute_pipeline(iter([batch]), model)

    contenders = {"without": Contender("without", partial(step), [stage])}
    return {
        "times": alternate(contenders, rounds),
        "simulated": {"without": pipeflow.simulate(schedule, cost).makespan},
    }


def _mean(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return (outputs - labels).square().mean()
