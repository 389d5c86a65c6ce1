"""What a step keeps, counted truly: by what is still alive, not by what the engine believes."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections import defaultdict
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from pipeflow import Pipeline, Schedule, execute_pipeline, lower, simulate
from pipeflow.core.dataflow import Content
from pipeflow.core.program import Program, Release, Send
from pipeflow.engine.deferral.products import Deferral, product_of
from pipeflow.engine.parallel.context import current_context
from pipeflow.testing import run_processes, run_threads
from pipeflow.testing.models import WIDTH
from tests.runtime.work import drawn_at_random, each_once, schedule_of, variants

SAMPLE = torch.ones(1, 3, WIDTH)


class Kept:
    """A tensor that autograd saved; autograd holds this in its place."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class Alive:
    """How many of what it was shown are alive, and how many were at once."""

    def __init__(self) -> None:
        self.kept = self.most_kept = 0
        self.storages: list[StorageWeakRef] = []
        self.most_storages = 0

    def keep(self, tensor: Tensor) -> Kept:
        kept = Kept(tensor)
        weakref.finalize(kept, self._drop)
        self.kept += 1
        self.most_kept = max(self.most_kept, self.kept)
        return kept

    def _drop(self) -> None:
        self.kept -= 1

    def watch(self, tensor: Tensor) -> None:
        self.storages.append(StorageWeakRef(tensor.untyped_storage()))
        self.most_storages = max(self.most_storages, self.alive_storages())

    def alive_storages(self) -> int:
        self.storages = [storage for storage in self.storages if not storage.expired()]
        return len(self.storages)


class Doubling(torch.autograd.Function):
    """Saves one tensor of its own. Its product needs the input and the output's gradient, as a linear layer's does."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, deferral: Deferral) -> Tensor:
        ctx.save_for_backward(hidden.clone())
        ctx.product = weight, hidden, deferral
        return hidden * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        weight, hidden, deferral = ctx.product
        assert ctx.saved_tensors
        deferral.take(product_of(scale_gradient, weight, None, hidden, gradient))
        return gradient * 2, None, None


def scale_gradient(weight: nn.Parameter, hidden: Tensor, gradient: Tensor, with_bias: bool) -> list[Tensor]:
    return [(hidden * gradient).sum()]


class Watched(nn.Module):
    def __init__(self, alive: Alive, *, is_last: bool) -> None:
        super().__init__()
        self.alive = alive
        self.is_last = is_last
        self.weight = nn.Parameter(torch.ones(()))
        self.deferral: Deferral | None = None

    def deferred_parameters(self) -> list[nn.Parameter]:
        return [self.weight]

    def forward(self, hidden: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(self.alive.keep, lambda kept: kept.tensor):
            output: Tensor = Doubling.apply(hidden, self.weight, self.deferral)  # type: ignore[no-untyped-call]
        if not self.is_last:
            self.alive.watch(output)
        return output


def build_watched(schedule: Schedule, shape: tuple[int, ...] | None, alive: Alive) -> Pipeline:
    last = schedule.placement.num_stages - 1
    held = schedule.placement.stages_of(current_context().pipeline_rank)
    stages = nn.ModuleList(Watched(alive, is_last=stage == last) for stage in held)
    return Pipeline(stages, schedule, criterion=lambda output, _: output.mean(), tensor_shape=shape)


def run_watched(schedule: Schedule, shape: tuple[int, ...] | None) -> dict[str, int]:
    alive = Alive()
    pipeline = build_watched(schedule, shape, alive)
    run_thrice(pipeline)
    counted = {"kept": alive.most_kept, "outputs": alive.most_storages, "left": alive.kept + alive.alive_storages()}
    alive.most_kept = 0
    run_thrice(pipeline, forward_only=True)
    return {**counted, "kept in evaluation": alive.most_kept}


def run_thrice(pipeline: Pipeline, *, forward_only: bool = False) -> None:
    """From the third step on, receives of what has no given shape are posted ahead too."""
    batch = SAMPLE.repeat(pipeline.schedule.num_microbatches, 1, 1)
    for _ in range(3):
        execute_pipeline(iter([(batch, None)]), pipeline, forward_only=forward_only)


def most_under_way(program: Program) -> int:
    """The most activations that are sent and not yet released."""
    under_way = most = 0
    for instruction in program.instructions:
        match instruction:
            case Send(value) if value.content is Content.ACTIVATION:
                under_way += 1
                most = max(most, under_way)
            case Release(value) if value.content is Content.ACTIVATION:
                under_way -= 1
            case _:
                pass
    return most


def require_counted(schedule: Schedule, results: list[dict[str, int]]) -> None:
    timeline, programs = simulate(schedule), lower(schedule)
    for rank, counted in enumerate(results):
        assert counted["kept"] == timeline.peak_activations[rank] * schedule.placement.chunks_per_rank
        assert counted["left"] == 0
        assert counted["kept in evaluation"] == 0
        if all(here != there for here, there in pairwise(schedule.placement.paths[0])):  # else the next stage has it
            assert counted["outputs"] == most_under_way(programs[rank])


@pytest.mark.some(4)
@pytest.mark.parametrize("shape", [None, tuple(SAMPLE.shape)], ids=str)
@pytest.mark.parametrize("variant", each_once(variants()))
def test_activations_alive_are_as_many_as_planned(variant: tuple[str, int, int], shape: tuple[int, ...] | None) -> None:
    for microbatches in (1, 4, 9):
        schedule = schedule_of(variant, microbatches)
        require_counted(schedule, run_threads(run_watched, variant[1], schedule, shape))


@pytest.mark.some(1)
@pytest.mark.parametrize("first", range(0, 60, 20))
def test_activations_alive_are_as_many_as_planned_in_any_order(first: int) -> None:
    for seed in range(first, first + 20):
        schedule = drawn_at_random(seed)
        require_counted(schedule, run_threads(run_watched, schedule.placement.num_ranks, schedule, None))


@pytest.mark.exhaustive
def test_over_gloo_too() -> None:
    for variant in (("1f1b", 2, 1), ("interleaved-1f1b", 2, 2)):
        schedule = schedule_of(variant, 6)
        require_counted(schedule, run_processes(run_watched, 2, schedule, None))


def test_what_was_sent_is_let_go() -> None:
    schedule = schedule_of(("1f1b", 4, 1), 32)
    for counted in run_threads(run_watched, 4, schedule, None):
        assert counted["outputs"] <= 4


@pytest.fixture
def received(monkeypatch: pytest.MonkeyPatch) -> dict[str, Alive]:
    """Per rank (a thread's name), the memory that the engine makes to receive into."""
    alive: dict[str, Alive] = defaultdict(Alive)
    empty = torch.empty

    def watched(*arguments: Any, **options: Any) -> Tensor:
        tensor: Tensor = empty(*arguments, **options)
        caller = sys._getframe(1).f_globals["__name__"]
        if caller.startswith("pipeflow.engine.runtime.") and tensor.shape == SAMPLE.shape:
            alive[threading.current_thread().name].watch(tensor)
        return tensor

    monkeypatch.setattr(torch, "empty", watched)
    return alive


def run_receiving(schedule: Schedule, shape: tuple[int, ...] | None, forward_only: bool) -> None:
    run_thrice(build_watched(schedule, shape, Alive()), forward_only=forward_only)


def require_received(schedule: Schedule, received: dict[str, Alive]) -> None:
    """It is kept for the next step, and goes with the Pipeline."""
    gc.collect()
    for program in lower(schedule):
        counted = received[f"rank {program.rank}"]
        assert counted.most_storages == program.receive_buffers
        assert counted.alive_storages() == 0
    received.clear()


@pytest.mark.some(4)
@pytest.mark.parametrize("shape", [None, tuple(SAMPLE.shape)], ids=str)
@pytest.mark.parametrize("variant", each_once([variant for variant in variants() if variant[1] > 1]))
def test_receive_buffers_are_as_many_as_planned(
    variant: tuple[str, int, int], shape: tuple[int, ...] | None, received: dict[str, Alive]
) -> None:
    schedule = schedule_of(variant, 8).without_pairs()
    run_threads(run_receiving, variant[1], schedule, shape, False)
    require_received(schedule, received)
    run_threads(run_receiving, variant[1], schedule, shape, True)
    require_received(schedule.forward_only(), received)


def test_1f1b_receives_into_few_buffers(received: dict[str, Alive]) -> None:
    run_threads(run_receiving, 4, schedule_of(("1f1b", 4, 1), 32), None, False)
    assert all(alive.most_storages <= 10 for alive in received.values())
