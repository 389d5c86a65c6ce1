"""Gradients of replicas: the bytes that a step asks of collectives, and the most memory beside weights and `.grad`,
with a plain optimizer and with Zero. Counts, which need no quiet machine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from benchmarks.processes import run_ranks
from benchmarks.report import Report

LAYERS, WIDTH = 40, 1024  # weights of 4 MiB each
MIB = 2**20
OPTIMIZERS = ("plain", "zero")
ASKED: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda ranks: 2 * (ranks - 1) / ranks,
    "reduce": lambda ranks: (ranks - 1) / ranks,
    "broadcast": lambda ranks: (ranks - 1) / ranks,
}
"""What a rank sends in a collective, on average and at least, as a part of its tensor."""


def run(rounds: int | None = None) -> Report:
    """`rounds` changes nothing: a count needs one."""
    columns = ["", "bytes / ((n - 1) / n of the gradients)", "MiB in the batch", "MiB in the optimizer's step"]
    title = f"gradients: {LAYERS * WIDTH * WIDTH * 4 // MIB} MiB of them on each replica, beside weights and .grad"
    report = Report("gradients", title, columns)
    for replicas in (2, 3):
        for optimizer in OPTIMIZERS:
            options = {"optimizer": optimizer, "launch": {"pipeline": 1}}
            found = run_ranks("gradients:measure", replicas, options, deadline=180)
            most = [max(each[name] for each in found) for name in ("bytes", "batch", "step")]
            label = f"{optimizer}, {replicas} replicas"
            report.rows.append([label, f"{most[0]:.3f}", *(f"{each / MIB:.0f}" for each in most[1:])])
            report.data[label] = found
    report.notes.append(
        "what a step asks of collectives: a rank's part of each, on average; target: 2 with Zero, 64 MiB"
    )
    return report


def measure(optimizer: str) -> dict[str, float]:
    """On every rank: a second step, with the gradients of the first cleared."""
    import torch
    from torch import nn

    from pipeflow import Pipeline, execute_pipeline, make_schedule
    from pipeflow.engine.parallel.context import current_context
    from pipeflow.optim import Zero

    layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]
    model = Pipeline(
        nn.Sequential(*layers), make_schedule("1f1b", ranks=1, microbatches=2), criterion=nn.functional.mse_loss
    )
    stepper: Any = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, foreach=True)
    stepper = Zero(model, stepper) if optimizer == "zero" else stepper
    replicas, data = current_context().data_size, torch.randn(2, WIDTH)
    total = sum(weight.nbytes for weight in model.parameters())
    for _ in range(2):
        stepper.zero_grad()
        with _counted(replicas) as asked:
            batch = _most(lambda: execute_pipeline(iter([(data, data)]), model)) - total
            taken = _most(stepper.step)
    return {"bytes": asked.total() / total / ((replicas - 1) / replicas), "batch": batch, "step": taken}


def _most(call: Callable[[], object]) -> int:
    """The most bytes on the CPU during the call, beyond those before it."""
    import torch

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        call()
    now = most = 0
    events = (event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]")
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


@contextmanager
def _counted(ranks: int) -> Iterator[Counter[str]]:
    """Counts what collectives of this rank's groups are asked for, in bytes that a rank sends."""
    from pipeflow.engine.parallel.transport.distributed import DistributedGroup

    found = Counter[str]()
    plain = {name: getattr(DistributedGroup, name) for name in ASKED}

    def counting(name: str) -> Callable[..., Any]:
        def call(group: Any, tensor: Any, *arguments: Any) -> Any:
            found[name] += int(ASKED[name](ranks) * tensor.nbytes)
            return plain[name](group, tensor, *arguments)

        return call

    for name in plain:
        setattr(DistributedGroup, name, counting(name))
    try:
        yield found
    finally:
        for name, method in plain.items():
            setattr(DistributedGroup, name, method)
