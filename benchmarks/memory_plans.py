"""Memory kinds: do plans with recomputations, offloads, loads, gathers of weights and the optimizer's steps hold, and
does waiting hide recomputations?

Stages sleep, and so do copies, gathers and the optimizer, on 4 ranks that are processes; sleeping needs no cores. Every
schedule of the registry runs with all stages recomputed, with all stages offloaded, with both on every other stage, and
with the optimizer's steps. Then all stages are under fully_shard, and gathered ahead, with these steps and without;
schedules in two directions cannot be. Per step, costs are measured in a traced step and simulated; the plan stands
beside an untraced step. Then few microbatches are recomputed under 1f1b, where ranks wait for gradients anyway.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from benchmarks.compute import milliseconds
from benchmarks.measure import Times, paired, step_times
from benchmarks.processes import run_ranks
from benchmarks.report import Report

if TYPE_CHECKING:
    import pipeflow

RANKS, MICROBATCHES, FEW = 4, 8, 4
FORWARD, BACKWARD, COPY = 0.012, 0.024, 0.008  # seconds, of a rank's whole share of the model
GATHER, STEP = 0.016, 0.010
PLAIN, RECOMPUTED = "plain", "recomputed"


def run(rounds: int | None = None) -> Report:
    rounds = rounds or 3
    results = run_ranks("memory_plans:measure", RANKS, {"rounds": rounds}, deadline=300 + 200 * rounds)
    times, plans = step_times([each["times"] for each in results]), results[0]["planned"]
    words = {"F": FORWARD, "B": BACKWARD, "copies": COPY, "gathers": GATHER, "S": STEP}
    listed = ", ".join(f"{word} {1e3 * seconds:.0f} ms" for word, seconds in words.items())
    title = f"memory_plans: {RANKS} ranks, {listed}, {rounds} rounds"
    report = Report("memory_plans", title, ["", "planned ms", "measured ms", "planned / measured"])
    report.data = {"measured seconds": times, "planned seconds": plans}
    for label, seconds in plans.items():
        ratio = paired({"planned": seconds, "measured": times[label]}, "planned", "measured")
        report.rows.append([label, milliseconds(seconds), milliseconds(times[label]), f"{ratio:.3f}"])
    report.notes.append("target: planned / measured within 0.95 and 1.05")
    report.notes.append(_hidden(times))
    return report


def _hidden(times: Times) -> str:
    """How much of the recomputations of few microbatches the waiting of ranks hides."""
    few, label = uses("1f1b", FEW), f"1f1b, {FEW} microbatches"
    again = sum(str(entry).startswith("0C") for entry in few[RECOMPUTED].rows[0]) * FORWARD
    hidden = again - paired_difference(times, f"{label}: {RECOMPUTED}", f"{label}: {PLAIN}")
    planned = {use: simulate(few[use]) for use in (PLAIN, RECOMPUTED)}
    promised = again - planned[RECOMPUTED] + planned[PLAIN]
    return (
        f"{label}: rank 0 recomputes for {1e3 * again:.0f} ms, of which {1e3 * promised:.1f} ms are planned to cost no "
        f"time, and {1e3 * hidden:.1f} ms cost none: {hidden / promised:.0%} (target: 80 %)"
    )


def paired_difference(times: Times, name: str, other: str) -> float:
    """The median over rounds of the difference of two times of the same round."""
    return statistics.median(mine - its for mine, its in zip(times[name], times[other], strict=True))


def uses(name: str, microbatches: int) -> dict[str, pipeflow.Schedule]:
    """By name: the schedule without the kinds, and with them. Pairs are run one after the other."""
    import pipeflow

    plain = pipeflow.make_schedule(name, ranks=RANKS, microbatches=microbatches).without_pairs()
    cost, stages = cost_of(plain), range(plain.placement.num_stages)
    half = pipeflow.with_recompute(plain, stages[::2])
    return {
        PLAIN: plain,
        RECOMPUTED: pipeflow.with_recompute(plain),
        "offloaded": pipeflow.with_offload(plain, cost),
        "both": pipeflow.with_offload(half, cost, stages[1::2]),
        "stepped": pipeflow.with_optimizer_step(plain),
    }


def gathered(name: str) -> dict[str, pipeflow.Schedule]:
    """By name: the schedule with weights that are gathered ahead. None in two directions."""
    import pipeflow

    plain = pipeflow.make_schedule(name, ranks=RANKS, microbatches=MICROBATCHES).without_pairs()
    if len(plain.placement.paths) > 1:
        return {}
    ahead = pipeflow.with_unshard(plain)
    return {"gathered": ahead, "gathered and stepped": pipeflow.with_optimizer_step(ahead)}


def cost_of(schedule: pipeflow.Schedule) -> pipeflow.CostModel:
    """Whole backwards, since nothing in these stages can wait for W."""
    import pipeflow

    times = {"forward": FORWARD, "backward_input": BACKWARD, "backward_weight": 0, "offload": COPY}
    return pipeflow.CostModel.even(schedule.placement, **times)


def simulate(schedule: pipeflow.Schedule) -> float:
    import pipeflow

    return pipeflow.simulate(schedule, cost_of(schedule)).makespan


def measure(rounds: int) -> dict[str, Times]:
    """On every rank: the times of untraced steps, and what the plan of each traced step says."""
    import torch

    from pipeflow.schedules import SCHEDULES

    times: Times = {}
    plans: Times = {}
    for name in SCHEDULES:
        found = uses(name, MICROBATCHES)
        del found[PLAIN]
        _measure(name, found, rounds, times, plans)
        if ahead := gathered(name):
            _measure(name, ahead, rounds, times, plans, sharded=True)
        torch.distributed.barrier()
    few = uses("1f1b", FEW)
    _measure(f"1f1b, {FEW} microbatches", {use: few[use] for use in (PLAIN, RECOMPUTED)}, 4 * rounds, times, plans)
    return {"times": times, "planned": plans}


def _measure(
    label: str,
    found: dict[str, pipeflow.Schedule],
    rounds: int,
    times: Times,
    plans: Times,
    *,
    sharded: bool = False,
) -> None:
    import torch

    from benchmarks.measure import alternate

    schedule = next(iter(found.values()))
    share = schedule.placement.chunks_per_rank
    model = _model(schedule, sharded=sharded)
    batch = torch.ones(schedule.num_microbatches, 16)
    traced = {use: Traced(model, batch, each) for use, each in found.items()}
    with slow_copies(COPY / share), slow_gathers(GATHER / share):
        untraced = {use: each.untraced for use, each in traced.items()}
        measured = alternate(untraced | {f"{use}, traced": each.traced for use, each in traced.items()}, rounds)
    for use, each in traced.items():
        times[f"{label}: {use}"] = measured[use]
        plans[f"{label}: {use}"] = each.planned[-rounds:]


def _model(schedule: pipeflow.Schedule, *, sharded: bool) -> pipeflow.Pipeline:
    """This rank's stages, of which the optimizer takes a time for each."""
    import torch
    from torch import nn
    from torch.distributed.fsdp import fully_shard

    import pipeflow
    from pipeflow.engine.parallel.context import current_context

    placement = schedule.placement
    share, context = placement.chunks_per_rank, current_context()
    own = placement.stages_of(context.pipeline_rank)
    stages = nn.ModuleList(stage(FORWARD / share, BACKWARD / share) for _ in own)
    for each in stages if sharded else ():
        fully_shard(each, mesh=context.mesh["data"])

    class Slow(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            time.sleep(STEP / share)
            return super().step(closure)

    model = pipeflow.Pipeline(stages, schedule, criterion=nn.functional.mse_loss, tensor_shape=(1, 16))
    pipeflow.PipelinedOptimizer(model, Slow(model.parameters(), lr=0.0), clip_grad_norm=1e6)
    return model


class Traced:
    """Steps of a schedule: untraced, and traced with what each one's costs promise."""

    def __init__(self, model: pipeflow.Pipeline, batch: Any, schedule: pipeflow.Schedule) -> None:
        from benchmarks.task import Contender

        self.model, self.batch, self.schedule = model, batch, schedule
        self.timelines: list[pipeflow.Timeline] = []
        self.untraced = Contender("untraced", self.step, [model])
        self.traced = Contender("traced", lambda: self.timelines.append(self.step(trace=True)), [model])

    def step(self, *, trace: bool = False) -> Any:
        import pipeflow

        data = iter([(self.batch, self.batch)])
        return pipeflow.execute_pipeline(data, self.model, schedule=self.schedule, trace=trace).timeline

    @property
    def planned(self) -> list[float]:
        import pipeflow
        from pipeflow.core.agreement_rounds import step_time
        from pipeflow.core.dataflow import Stream

        costs = [pipeflow.measured_costs(timeline) for timeline in self.timelines]
        reduces = Stream.REDUCE in self.timelines[0].streams
        ran = self.schedule.with_reductions() if reduces else self.schedule
        return [step_time(pipeflow.simulate(ran, cost), cost) for cost in costs]


@contextmanager
def slow_copies(seconds: float) -> Iterator[None]:
    """A region in which a copy to the host or back takes a time."""
    from pipeflow.engine.runtime.program.saved import Saved

    moves = Saved.to_host, Saved.to_device

    def slowly(move: Any) -> Any:
        def moved(saved: Saved, stream: Any) -> Any:
            time.sleep(seconds)
            return move(saved, stream)

        return moved

    Saved.to_host, Saved.to_device = map(slowly, moves)  # type: ignore[method-assign]  # slowed to be measured
    try:
        yield
    finally:
        Saved.to_host, Saved.to_device = moves  # type: ignore[method-assign]  # slowed to be measured


@contextmanager
def slow_gathers(seconds: float) -> Iterator[None]:
    """A region in which a gather of weights takes a time, one after the other."""
    from concurrent.futures import Future, ThreadPoolExecutor

    from pipeflow.engine.runtime.gradients.fully_sharded import Unshard

    begin, thread = Unshard.begin, ThreadPoolExecutor(1)

    class Slept:
        def __init__(self, future: Future[None]) -> None:
            self.wait = future.result

    def slowly(self: Unshard) -> Any:
        return [*begin(self), Slept(thread.submit(time.sleep, seconds))]

    Unshard.begin = slowly  # type: ignore[method-assign]  # slowed to be measured
    try:
        yield
    finally:
        Unshard.begin = begin  # type: ignore[method-assign]  # slowed to be measured
        thread.shutdown()


def stage(forward: float, backward: float) -> Any:
    """A stage that sleeps before what it saves, so that a recomputation takes as long as a forward."""
    import torch
    from torch import Tensor, nn

    from benchmarks.models import Sleep

    class SavingStage(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.rand(2, 16) + 0.5)

        def forward(self, hidden: Tensor) -> Tensor:
            first, last = self.scale
            slept: Tensor = Sleep.apply(hidden * first, forward, backward)  # type: ignore[no-untyped-call]  # as torch has it
            output: Tensor = slept * last
            return output

    return SavingStage()
