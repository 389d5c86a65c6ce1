"""Slow links: does a plan hold whose transfers take time? 4 ranks on two sides of a wire that is slow (network
namespaces, as root), stages that sleep, several schedules; per schedule the makespan of traced steps beside what
`simulate` says under the link's latency and bandwidth, and the time of untraced ones beside `step_time`.
"""

from __future__ import annotations

import os
import statistics
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from benchmarks.measure import Times, step_times
from benchmarks.processes import Place, run_ranks
from benchmarks.report import Report
from benchmarks.wire import SIDES, Wire, can_lay

if TYPE_CHECKING:
    from pipeflow import CostModel, Link

RANKS = 4
FORWARD, BACKWARD = 0.010, 0.020
SCHEDULES = {"gpipe": 1, "1f1b": 1, "interleaved-1f1b": 2, "zb-h1": 1}
MICROBATCHES = (4, 12)
LINKS = {  # latency in seconds, bandwidth in bytes per second, bytes of an activation
    "5 ms": (0.005, float("inf"), 4096),
    "100 Mbit/s": (0.0, 12.5e6, 65536),
}


def run(rounds: int | None = None) -> Report:
    rounds = rounds or 5
    title = f"links: {RANKS} ranks on two sides of a wire, F 10 ms and B 20 ms a rank, {rounds} rounds"
    columns = ["", "planned ms", "traced ms", "planned / traced", "step planned ms", "step ms", "planned / measured"]
    report = Report("links", title, columns)
    if not can_lay():
        report.notes.append("skipped: needs root, `ip netns` and /dev/net/tun")
        return report
    for name, (latency, bandwidth, size) in LINKS.items():
        options = {"rounds": rounds, "latency": latency, "bandwidth": bandwidth, "size": size}
        with Wire(latency, bandwidth) as wire:
            places = [Place(wire.sides[side(rank)], SIDES[0]) for rank in range(RANKS)]
            results = run_ranks("links:measure", RANKS, options, deadline=120 + 30 * rounds, places=places)
        traced = step_times([each["times"] for each in results])
        found = results[0]["found"]
        for case, each in found.items():
            _add(report, f"{name}: {case}", traced[case], **each)
    return report


def _add(
    report: Report, name: str, steps: list[float], planned: list[float], traced: list[float], ends: list[float]
) -> None:
    report.data[name] = {"planned": planned, "traced": traced, "steps planned": ends, "steps": steps}
    ratios = [
        statistics.median(a / b for a, b in zip(*pair, strict=True)) for pair in ((planned, traced), (ends, steps))
    ]
    texts = [f"{1e3 * statistics.median(each):.1f}" for each in (planned, traced, ends, steps)]
    report.rows.append([name, *texts[:2], f"{ratios[0]:.3f}", *texts[2:], f"{ratios[1]:.3f}"])


def side(rank: int) -> int:
    return 2 * rank // RANKS


def measure(rounds: int, latency: float, bandwidth: float, size: int) -> dict[str, Any]:
    """On every rank: per schedule and number of microbatches the times of its steps, and what its plans say."""
    import torch
    from torch.nn import functional

    import pipeflow
    from benchmarks import pipeflow_side
    from benchmarks.measure import alternate
    from benchmarks.models import SleepStage
    from benchmarks.plans import Traced
    from benchmarks.task import Task

    def make_stages(number: int) -> list[torch.nn.Module]:
        return [SleepStage(size // 4) for _ in range(number)]

    go_first()
    rank = int(os.environ["RANK"])
    times: Times = {}
    found: dict[str, dict[str, list[float]]] = {}
    for microbatches in MICROBATCHES:
        batch = torch.ones(2, microbatches, size // 4)
        task = Task(RANKS, microbatches, make_stages, functional.mse_loss, inputs=batch[0], labels=batch[1])
        for name, chunks in SCHEDULES.items():
            SleepStage.forward_seconds, SleepStage.backward_seconds = FORWARD / chunks, BACKWARD / chunks
            placement = pipeflow_side.schedule_of(task, name, chunks).placement
            cost = pipeflow.CostModel.even(placement, FORWARD, BACKWARD / 2, BACKWARD / 2)
            linked = partial(_linked, link=pipeflow.Link(latency, bandwidth), size=size)
            contender = pipeflow_side.contender(task, rank, name, chunks=chunks, cost=linked(cost))
            traced = Traced(task, contender.runner)
            notice = 0.02 + 10 * latency
            both = alternate({"untraced": contender, "traced": traced.contender}, rounds, notice=notice)
            case = f"{name}, {microbatches}"
            times[case] = both["untraced"]
            timelines = traced.timelines[-rounds:]
            costs = [linked(pipeflow.measured_costs(each)) for each in timelines]
            plans = [pipeflow.simulate(contender.runner.schedule, each) for each in costs]
            found[case] = {
                "planned": [plan.makespan for plan in plans],
                "traced": [each.makespan for each in timelines],
                "ends": [pipeflow.step_time(*each) for each in zip(plans, costs, strict=True)],
            }
    return {"times": times, "found": found}


def go_first() -> None:
    """Lets every thread of this process run before whatever else the machine does: what is asked is what links take."""
    for thread in os.listdir("/proc/self/task"):
        with suppress(ProcessLookupError):  # it has ended since
            os.sched_setscheduler(int(thread), os.SCHED_FIFO, os.sched_param(1))


def _linked(cost: CostModel, *, link: Link, size: int) -> CostModel:
    """The cost of computations, with that of the wire between the sides; within one, transfers are free."""
    ranks = range(RANKS)
    far = [(one, other) for one in ranks for other in ranks if side(one) != side(other)]
    sizes = (float(size),) * len(cost.forward)
    return replace(cost, latency=0.0, activation_bytes=sizes, links=dict.fromkeys(far, link))
