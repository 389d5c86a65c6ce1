"""A GPT on real text under a cap of a quarter of what 1F1B keeps: does it train, and is it as slow as planned?

The example's tiny GPT on 4 ranks that are processes. Stages sleep beside their computations, and so do copies, so that
few cores are enough for the times of devices. The order under the cap is found by the search, from costs that a traced
step shows and the bytes that each stage really saves. The memory of saved tensors that is alive is counted.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.memory_plans import slow_copies
from benchmarks.processes import run_ranks
from benchmarks.report import Report

if TYPE_CHECKING:
    import pipeflow

RANKS, CHUNKS, MICROBATCHES, SAMPLES, LENGTH = 4, 2, 8, 2, 64
FORWARD, BACKWARD, COPY = 0.02, 0.04, 0.01  # seconds, of a rank's whole share of the model
PLAIN, CAPPED = "1f1b", "within a quarter"


def run(rounds: int | None = None) -> Report:
    """`rounds` are steps here."""
    steps = rounds or 40
    results = run_ranks("offload_gpt:measure", RANKS, {"steps": steps}, deadline=120 + 4 * steps)
    title = f"offload_gpt: the example's tiny GPT on {RANKS} ranks, {MICROBATCHES} microbatches, {steps} steps of text"
    columns = ["", "planned ms", "measured ms", "planned kB", "most kB", "first loss", "last loss"]
    report = Report("offload_gpt", title, columns, data={"ranks": results})
    for name in (PLAIN, CAPPED):
        each = [result[name] for result in results]
        seconds = statistics.median(map(max, zip(*(one["seconds"] for one in each), strict=True)))
        cells = [f"{1e3 * number:.1f}" for number in (each[0]["planned"], seconds)]
        most = max(one["most bytes"] for one in each)
        cells += [f"{max(each[0]['planned bytes']) / 1e3:.0f}", f"{most / 1e3:.0f}" if most else "-"]
        losses = each[-1]["losses"]
        report.rows.append([name, *cells, f"{losses[0]:.3f}", f"{losses[-1]:.3f}"])
        report.data[name] = {"seconds": seconds, "planned": each[0]["planned"]}
    plain, capped = (report.data[name] for name in (PLAIN, CAPPED))
    planned, measured = (capped[which] / plain[which] for which in ("planned", "seconds"))
    cap = max(results[0][PLAIN]["planned bytes"]) / 4
    report.notes.append(
        f"cap: {cap / 1e3:.0f} kB; a step within it takes {planned:.3f} x 1f1b as planned, {measured:.3f} x as measured"
    )
    report.notes.append("what 1f1b keeps is not counted: its tensors are not held for copies")
    return report


def measure(steps: int) -> dict[str, Any]:
    """On every rank: losses, times and bytes of both trainings."""
    import torch

    import pipeflow

    torch.manual_seed(0)
    sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
    plain = pipeflow.make_schedule("1f1b", ranks=RANKS, microbatches=MICROBATCHES)
    chunked = pipeflow.make_schedule("interleaved-1f1b", ranks=RANKS, microbatches=MICROBATCHES, chunks=CHUNKS)
    whole, parts = Training(plain), Training(chunked)
    cost = parts.cost()
    peaks = pipeflow.simulate(plain, whole.cost()).peak_bytes
    found = pipeflow.search(
        chunked.placement, MICROBATCHES, cost, bytes_cap=max(peaks) / 4, kinds=["offload"], candidates=500
    )
    everyone: list[str] = [""] * RANKS
    torch.distributed.all_gather_object(everyone, found.schedule.to_csv())
    capped = pipeflow.Schedule.from_csv(everyone[0], chunked.placement, name=CAPPED)
    return {PLAIN: whole.train(plain, steps), CAPPED: parts.train(capped, steps)}


def all_offloaded(schedule: pipeflow.Schedule) -> pipeflow.Schedule:
    """The schedule with a copy to the host after each forward, and one back before its backward."""
    import re

    import pipeflow

    text = re.sub(r"(\d+)F(\d+)", r"\1F\2,\1O\2", schedule.to_csv())
    return pipeflow.Schedule.from_csv(re.sub(r"(\d+)B(\d+)", r"\1L\2,\1B\2", text), schedule.placement)


class Training:
    """A pipeline of the GPT with stages that sleep, its optimizer, and what is known of its costs."""

    def __init__(self, schedule: pipeflow.Schedule) -> None:
        import torch

        import pipeflow
        from gpt3.build import build_gpt_pipeline, options_of
        from gpt3.data import prepare, wait_for
        from gpt3.model import GPTLMLoss

        shape, rank = pipeflow.GPT.named("tiny"), int(os.environ["RANK"])
        self.corpus = (wait_for if rank else prepare)(None, shape.vocabulary)
        self.schedule = schedule
        chunks = schedule.placement.chunks_per_rank
        stages = build_gpt_pipeline(RANKS * CHUNKS, placement=schedule.placement, seed=0, **options_of(shape))
        for stage in stages if isinstance(stages, torch.nn.ModuleList) else [stages]:
            stage.register_forward_hook(sleeping(FORWARD / chunks, BACKWARD / chunks))
        self.copy = COPY / chunks
        self.model = pipeflow.Pipeline(stages, schedule, criterion=GPTLMLoss())
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def step(self, schedule: pipeflow.Schedule, number: int, *, trace: bool = False) -> Any:
        import pipeflow

        ids = self.corpus.batch(MICROBATCHES * SAMPLES, LENGTH, seed=0, step=number)
        data = iter([({"input_ids": ids}, ids)])
        return pipeflow.execute_pipeline(data, self.model, schedule=schedule, trace=trace, broadcast_loss=True)

    def cost(self) -> pipeflow.CostModel:
        """From a traced step in which everything is offloaded: the times of its actions, and the bytes of stages."""
        from dataclasses import replace

        import torch

        import pipeflow

        moved = all_offloaded(self.schedule)
        with Bytes() as counted, slow_copies(self.copy):
            self.step(moved, 0)
            timeline = self.step(moved, 0, trace=True).timeline
        self.model.zero_grad()
        everyone: list[dict[int, int]] = [{}] * RANKS
        torch.distributed.all_gather_object(everyone, counted.by_stage)
        sizes = {stage: size for each in everyone for stage, size in each.items()}
        self.known = replace(
            pipeflow.measured_costs(timeline), saved_bytes=tuple(float(sizes[stage]) for stage in sorted(sizes))
        )
        return self.known

    def train(self, schedule: pipeflow.Schedule, steps: int) -> dict[str, Any]:
        """Some steps of training under a schedule."""
        import torch

        import pipeflow
        from pipeflow.core.agreement_rounds import step_time

        losses, seconds = [], []
        with Bytes() as counted, slow_copies(self.copy):
            for number in range(steps):
                self.optimizer.zero_grad()
                torch.distributed.barrier()
                begin = time.monotonic()
                output = self.step(schedule, number)
                seconds.append(time.monotonic() - begin)
                self.optimizer.step()
                losses.append(float(output.loss))
        timeline = pipeflow.simulate(schedule, self.known)
        planned = {"planned": step_time(timeline, self.known), "planned bytes": timeline.peak_bytes}
        return {"losses": losses, "seconds": seconds[1:], "most bytes": counted.most, **planned}


class Bytes:
    """A region in which the memory of tensors that can be offloaded is counted, while it is alive.

    Attributes:
        most: the most bytes at once.
        by_stage: per stage, the most bytes that a microbatch saved.
    """

    def __init__(self) -> None:
        from threading import Lock

        self.most = 0
        self.by_stage: dict[int, int] = {}
        self._alive: dict[int, Any] = {}
        self._lock = Lock()

    def __enter__(self) -> Bytes:
        from pipeflow.engine.runtime.program.saved import Holder, Saved

        self._before = Holder.__init__, Saved.to_host, Saved.to_device
        make, to_host, to_device = self._before

        def made(holder: Any, tensor: Any, *, drop: bool = False) -> None:
            make(holder, tensor, drop=drop)
            self._watch(tensor)

        def out(saved: Any, stream: Any) -> Any:
            memories = [holder.tensor.untyped_storage() for holder in saved.holders]
            sizes = {memory._cdata: memory.nbytes() for memory in memories}
            stage = saved._stage
            self.by_stage[stage] = max(self.by_stage.get(stage, 0), sum(sizes.values()))
            return to_host(saved, stream)

        def back(saved: Any, stream: Any) -> Any:
            read = to_device(saved, stream)
            for holder in saved.holders:
                self._watch(holder.tensor)
            return read

        Holder.__init__, Saved.to_host, Saved.to_device = made, out, back  # type: ignore[method-assign,assignment]  # likewise
        return self

    def __exit__(self, *_: object) -> None:
        from pipeflow.engine.runtime.program.saved import Holder, Saved

        Holder.__init__, Saved.to_host, Saved.to_device = self._before  # type: ignore[method-assign]  # watched to be measured

    def _watch(self, tensor: Any) -> None:
        from torch.multiprocessing.reductions import StorageWeakRef

        storage = tensor.untyped_storage()
        with self._lock:
            self._alive = {key: each for key, each in self._alive.items() if not each[0].expired()}
            self._alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
            self.most = max(self.most, sum(size for _, size in self._alive.values()))


def sleeping(forward: float, backward: float) -> Any:
    """A hook after which a forward and its backward take so much longer."""
    from torch import Tensor

    from benchmarks.models import Sleep

    def slept(value: Any) -> Any:
        if isinstance(value, Tensor) and value.requires_grad:
            return Sleep.apply(value, forward, backward)  # type: ignore[no-untyped-call]  # as torch has it
        return tuple(map(slept, value)) if isinstance(value, tuple) else value

    return lambda _, __, output: slept(output)
