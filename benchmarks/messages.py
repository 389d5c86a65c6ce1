"""What passes between ranks in a step like the one before it: messages for each tensor, waits of the host for what a
message will be, and tensors whose memory is that of the last step. Pipelines of `from_module` on 2 ranks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from benchmarks.processes import run_ranks
from benchmarks.report import Report

RANKS, MICROBATCHES, LAYERS = 2, 8, 8
STEPS = 8  # of which the last two are compared
WIDTHS = {"64 kB": 16, "1 MB": 256}  # of an activation of 1,024 rows, in float32
SCHEDULES = ("1f1b", "interleaved-1f1b", "zb-v")


def run(rounds: int | None = None) -> Report:
    """`rounds` changes nothing: a count needs one."""
    results = run_ranks("messages:measure", RANKS, {}, deadline=240)
    columns = ["", "messages per tensor", "waits for headers", "received at the same address", "sent from the same one"]
    report = Report("messages", f"messages: {RANKS} ranks, {MICROBATCHES} microbatches, {LAYERS} layers", columns)
    for label in results[0]:
        counts = {key: sum(each[label][key] for each in results) for key in results[0][label]}
        messages = f"{counts['messages'] / counts['sent']:.2f}"
        same = [f"{counts[f'same {way}']} of {counts[way]}" for way in ("received", "sent")]
        report.rows.append([label, messages, str(counts["waits"]), *same])
    report.notes.append("targets: 1.00 messages, 0 waits, all received at the same address")
    report.notes.append("what a rank sends was computed, in memory that torch chose")
    report.data = {"ranks": results}
    return report


def measure() -> dict[str, dict[str, int]]:
    """On every rank: the counts of the last step, by schedule and bytes of an activation."""
    import torch
    from torch import nn
    from torch.nn import functional

    import pipeflow
    from pipeflow.engine.parallel.context import current_context

    found = {}
    for name in SCHEDULES:
        for size, width in WIDTHS.items():
            torch.manual_seed(0)
            layers = [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(LAYERS)]
            schedule = pipeflow.make_schedule(name, ranks=RANKS, microbatches=MICROBATCHES)
            rows = 1024 * MICROBATCHES
            batch = torch.randn(rows, width), torch.randn(rows, width)
            with _passing(current_context().transport) as passed:
                model = pipeflow.Pipeline.from_module(
                    nn.Sequential(*layers), schedule, batch, criterion=functional.mse_loss
                )
                steps = []
                for _ in range(STEPS):
                    model.zero_grad()
                    pipeflow.execute_pipeline(iter([batch]), model)
                    steps.append(dict(passed))
                    passed.clear()
            found[f"{name}, {size}"] = _counts(*steps[-2:])
    return found


def _counts(before: dict[Any, list[int]], last: dict[Any, list[int]]) -> dict[str, int]:
    from pipeflow.engine.parallel.transport.protocol import Tag

    bodies = Tag.ACTIVATION, Tag.REDIRECTED, Tag.GRADIENT
    counts: dict[str, int] = defaultdict(int)
    for (way, tag, peer), addresses in last.items():
        earlier = before.get((way, tag, peer), [])
        if tag in bodies:
            counts[way] += len(addresses)
            counts[f"same {way}"] += sum(one == other for one, other in zip(addresses, earlier, strict=False))
        if tag in (*bodies, Tag.HEADER, Tag.METADATA):
            counts["messages"] += len(addresses) * (way == "sent")
            counts["waits"] += len(addresses) * (way == "received" and tag not in bodies)
    return dict(counts) | {"waits": counts["waits"]}


@contextmanager
def _passing(transport: Any) -> Iterator[dict[tuple[str, Any, int], list[int]]]:
    """The addresses of what passes in Pipelines that are made meanwhile, by way, tag and peer."""
    passed: dict[tuple[str, Any, int], list[int]] = defaultdict(list)

    def seeing(make: Any, way: str) -> Any:
        def started(peer: int, tag: Any) -> Any:
            start = make(peer, tag)

            def move(tensors: list[Any]) -> Any:
                passed[way, tag, peer] += [tensor.data_ptr() for tensor in tensors]
                return start(tensors)

            return move

        return started

    vars(transport).update(sender=seeing(transport.sender, "sent"), receiver=seeing(transport.receiver, "received"))
    try:
        yield passed
    finally:
        for name in ("sender", "receiver"):
            vars(transport).pop(name)
