"""The bytes that a step really keeps, with recomputations and offloads, are those of the simulated timeline. They are
counted by the memory that is still alive.
"""

from __future__ import annotations

import time
from threading import Lock
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from pipeflow import CostModel, Pipeline, Schedule, execute_pipeline, lower, simulate, with_offload, with_recompute
from pipeflow.engine.parallel.context import current_context
from pipeflow.engine.runtime.program.saved import Saved
from pipeflow.testing import run_threads
from tests.runtime.work import largest, schedule_of, variants

SAVED, WIDTH, MICROBATCHES = 4096, 16, 6  # bytes that a stage saves, and those that it is given
FORWARD, BACKWARD, COPY = 0.01, 0.02, 0.002  # seconds
VARIANTS = largest(variants())


class Alive:
    """The bytes of the memory that it was shown and that is still there, and the most that there were at once."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._known: dict[int, tuple[StorageWeakRef, int]] = {}
        self._lock = Lock()
        self.most = 0

    def watch(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        with self._lock:
            self._known = {key: each for key, each in self._known.items() if not each[0].expired()}
            self._known[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
            self.most = max(self.most, sum(size for _, size in self._known.values()))


class Keeping(torch.autograd.Function):
    """Keeps a tensor for its backward, and takes a time."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, alive: Alive, seconds: tuple[float, float]) -> Tensor:
        kept = torch.full((SAVED,), alive.rank, dtype=torch.uint8)
        alive.watch(kept)
        ctx.save_for_backward(kept, hidden)
        ctx.seconds, ctx.rank = seconds[1], alive.rank
        time.sleep(seconds[0])
        return hidden * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        kept, _ = ctx.saved_tensors
        assert bool((kept == ctx.rank).all())
        time.sleep(ctx.seconds)
        return gradient, gradient.sum(), None, None


class Stage(nn.Module):
    def __init__(self, alive: Alive, seconds: tuple[float, float]) -> None:
        super().__init__()
        self.alive, self.seconds = alive, seconds
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, hidden: Tensor) -> Tensor:
        if hidden.requires_grad:  # else it is a part of the batch
            self.alive.watch(hidden)
        output: Tensor = Keeping.apply(hidden, self.weight, self.alive, self.seconds)  # type: ignore[no-untyped-call]
        return output


def counted(schedule: Schedule, seconds: tuple[float, float], patch: pytest.MonkeyPatch) -> list[int]:
    """Per rank, the most bytes in a step."""
    ranks = schedule.placement.num_ranks
    alive = [Alive(rank) for rank in range(ranks)]
    to_device, to_host = Saved.to_device, Saved.to_host

    def copy_out(saved: Saved, stream: None) -> list[Tensor]:
        time.sleep(COPY)
        return to_host(saved, stream)

    def copy_back(saved: Saved, stream: None) -> list[Tensor]:
        to_device(saved, stream)
        rank = int(saved.holders[0].unpacked()[0])
        for holder in saved.holders:
            alive[rank].watch(holder.unpacked())
        time.sleep(COPY)
        return []

    def run() -> None:
        rank = current_context().pipeline_rank
        stages = nn.ModuleList(Stage(alive[rank], seconds) for _ in schedule.placement.stages_of(rank))
        model = Pipeline(stages, schedule, criterion=lambda output, _: output.mean())
        execute_pipeline(iter([(torch.ones(schedule.num_microbatches, WIDTH), None)]), model)

    patch.setattr(Saved, "to_host", copy_out)
    patch.setattr(Saved, "to_device", copy_back)
    run_threads(run, ranks)
    return [each.most for each in alive]


def costs(schedule: Schedule) -> CostModel:
    stages = schedule.placement.num_stages
    given = (0, *(4 * WIDTH,) * (stages - 1))  # the first stage is given a part of the batch
    return CostModel(
        (FORWARD,) * stages,
        (BACKWARD,) * stages,
        (0.0,) * stages,
        saved_bytes=tuple(SAVED + each for each in given),
        input_bytes=given,
        offload=(COPY,) * stages,
    )


@pytest.mark.some(8)
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_recomputed_stages_keep_what_is_planned(variant: tuple[str, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = with_recompute(schedule_of(variant, MICROBATCHES).without_pairs())
    planned = simulate(schedule, costs(schedule)).peak_bytes
    spare = [4 * WIDTH * program.receive_buffers for program in lower(schedule)]  # memory for what is not received yet
    for found, limit, more in zip(counted(schedule, (0.0, 0.0), monkeypatch), planned, spare, strict=True):
        assert 0.97 * limit <= found <= limit + more


@pytest.mark.slow
@pytest.mark.some(4)
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_offloaded_stages_keep_no_more_than_is_planned(
    variant: tuple[str, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = schedule_of(variant, MICROBATCHES).without_pairs()
    cost = costs(plain)
    schedule = with_offload(plain, cost)
    planned = simulate(schedule, cost).peak_bytes
    tensor = max(cost.saved_bytes)  # if a copy ends when the next tensor is made, either may be first
    for slower in (1, 4, 16):  # a loaded machine delays copies
        found = counted(schedule, (slower * FORWARD, slower * BACKWARD), monkeypatch)
        if all(0.97 * limit <= each <= limit + tensor for each, limit in zip(found, planned, strict=True)):
            return
    pytest.fail(f"{found} bytes are kept, and {planned} are planned")
