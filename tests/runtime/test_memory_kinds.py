"""Recomputed and offloaded microbatches have the same gradients, bit by bit."""

from __future__ import annotations

import errno
import gc
import os
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from pipeflow import Pipeline, Schedule, UsageError, execute_pipeline, make_schedule
from pipeflow.testing import run_threads
from pipeflow.testing.models import KeywordModel, PlainModel, TiedModel, TinyModel, TreeModel
from tests.covering import covering, halved, some
from tests.runtime import kinds
from tests.runtime.work import Stepped, build, gradients_of, largest, run_steps, schedule_of, variants
from tests.stages.models import CASES

Variant = tuple[str, int, int]
MODELS = {"plain": PlainModel(), "tied": TiedModel(), "keywords": KeywordModel(), "trees": TreeModel()}


def require_equal(found: list[Stepped], expected: list[Stepped]) -> None:
    """Every bit of losses and gradients is the same on each rank."""
    for mine, its in zip(found, expected, strict=True):
        assert mine.losses == its.losses
        assert mine.gradients.keys() == its.gradients.keys()
        for name, gradient in its.gradients.items():
            assert mine.gradients[name].tobytes() == gradient.tobytes(), name


@cache
def model_of(kind: str, variant: Variant) -> TinyModel:
    return replace(MODELS[kind], layers=max(2, schedule_of(variant, 1).placement.num_stages))


@cache
def expected(kind: str, variant: Variant, data: int) -> list[Stepped]:
    return stepped(kind, variant, schedule_of(variant, 5), data)


def stepped(kind: str, variant: Variant, schedule: Schedule, data: int) -> list[Stepped]:
    model = model_of(kind, variant)
    batches = [model.batch(11, seed=seed) for seed in range(2)]  # the first microbatch is larger
    return run_threads(run_steps, data * variant[1], model, schedule, batches, data=data)


COLUMNS: tuple[Any, ...] = (largest(variants()), kinds.ALL, tuple(MODELS), (1, 2))


@pytest.mark.some(10)
@pytest.mark.parametrize(("variant", "use", "kind", "data"), halved(*COLUMNS, kept=covering(*COLUMNS)))
def test_every_schedule(variant: Variant, use: str, kind: str, data: int) -> None:
    schedule = kinds.with_kinds(schedule_of(variant, 5), use)
    require_equal(stepped(kind, variant, schedule, data), expected(kind, variant, data))


def modules_differ(kind: str) -> list[str]:
    """Of every use of the kinds: where gradients differ. Each is the first with its shapes, so the forward is planned
    when it runs.
    """
    case, wrong = CASES[kind], []
    plain = make_schedule("1f1b", ranks=2, microbatches=3)
    for number, schedule in enumerate((kinds.with_kinds(plain, "recomputed"), kinds.with_kinds(plain, kinds.MIXED))):
        found = []
        for each in (schedule, plain):
            model = Pipeline.from_module(case.module(), plain, case.batch(3), criterion=case.criterion)
            execute_pipeline(iter([case.batch(6 + number)]), model, schedule=each)
            found.append(kinds.gradients_of(model))
        wrong += kinds.differing(schedule, *found)
    return wrong


@pytest.mark.some(1)
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
@pytest.mark.parametrize("kind", some(CASES, ("decoder", "u-net", "reentrant")))
def test_modules_that_are_cut(kind: str) -> None:
    assert run_threads(modules_differ, 2, kind) == [[], []]


DRAWS = (
    "stage 0 draws from the random numbers of Python or NumPy, so its recomputation differs from its forward: draw "
    "from torch, or do not recompute the stage"
)


class Differs(nn.Module):
    """Saves for its backward what `make` returns, which differs each time."""

    def __init__(self, make: Callable[[int], Sequence[Tensor]]) -> None:
        super().__init__()
        self.make = make
        self.calls = count(1)  # is no state that a recomputation restores
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, hidden: Tensor) -> Tensor:
        total = hidden * self.weight
        for tensor in self.make(next(self.calls)):
            total = total + (self.weight * tensor).sum()
        return total


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda _: [torch.tensor(random.random())], DRAWS),
        (lambda _: [torch.tensor(numpy.random.rand())], DRAWS),
        (
            lambda call: [torch.ones(2)] * (5 - call),
            "stage 0 saved 2 tensors for its backward when it was computed again, the first time 4: a stage that is "
            "recomputed must do the same each time",
        ),
        (
            lambda call: [torch.ones(1 + call)],
            "stage 0 saved a tensor of torch.float32 of shape (4,) for its backward when it was computed again, the "
            "first time one of torch.float32 of shape (2,): a stage",
        ),
    ],
    ids=["random", "numpy", "fewer", "another shape"],
)
def test_a_stage_that_differs_each_time_is_not_recomputed(
    make: Callable[[int], Sequence[Tensor]], message: str
) -> None:
    def run() -> None:
        schedule = Schedule.from_csv("0F0,0F1,0C0,0B0,0B1")
        model = Pipeline(Differs(make), schedule, criterion=nn.functional.mse_loss)
        with pytest.raises(UsageError, match=re.escape(message)):
            execute_pipeline(iter([(torch.ones(2, 3), torch.ones(2, 3))]), model)

    run_threads(run, 1)


class Stops(nn.Module):
    """Counts how often it gets to its end; what comes after its last saved tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.starts, self.ends = count(), count()  # are no state that a recomputation restores

    def forward(self, hidden: Tensor) -> Tensor:
        next(self.starts)
        try:
            output: Tensor = self.linear(hidden.tanh())
        except Exception:  # an error in it would be caught
            return hidden
        next(self.ends)
        return output


def test_a_recomputation_ends_with_what_its_backward_needs() -> None:
    """The last product is not computed again, as in torch.utils.checkpoint."""

    def run() -> tuple[int, int]:
        stage = Stops()
        model = Pipeline(stage, Schedule.from_csv("0F0,0F1,0C0,0B0,0C1,0B1"), criterion=nn.functional.mse_loss)
        execute_pipeline(iter([(torch.ones(2, 3), torch.ones(2, 3))]), model)
        return next(stage.starts), next(stage.ends)

    assert run_threads(run, 1) == [(4, 2)]


def kept_without_collection(use: str) -> list[torch.Size]:
    """The shapes of tensors, other than the model's and the batch's, that are there after a step and are garbage."""
    plain = make_schedule("gpipe", ranks=1, microbatches=2)
    model = Pipeline(
        nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 5), nn.Tanh()), plain, criterion=nn.functional.mse_loss
    )
    [_, schedule] = kinds.uses_of(plain, (use,))
    batch = (torch.ones(22, 5), torch.ones(22, 5))
    execute_pipeline(iter([batch]), model, schedule=schedule)
    gc.collect()
    gc.disable()
    try:
        execute_pipeline(iter([batch]), model, schedule=schedule)
        return [each.shape for each in gc.get_objects() if type(each) is Tensor and each.shape[:1] == (11,)]
    finally:
        gc.enable()


@pytest.mark.parametrize("use", kinds.ALL)
def test_a_step_leaves_no_tensors_to_the_garbage_collector(use: str) -> None:
    """Python 3.12 keeps the frames of an exception that a generator catches."""
    assert run_threads(kept_without_collection, 1, use) == [[]]


# Files


def offloaded(folder: Path | None) -> Stepped:
    model = MODELS["tied"]
    pipeline = build(model, kinds.with_kinds(make_schedule("gpipe", ranks=1, microbatches=3), "offloaded"))
    pipeline.offload_folder = folder
    losses: list[float | None] = []
    for seed in range(2):
        loss = execute_pipeline(iter([model.batch(9, seed=seed)]), pipeline).loss
        losses.append(None if loss is None else loss.item())
    return Stepped(losses, gradients=gradients_of(pipeline))


def test_what_is_offloaded_goes_to_files_that_nothing_is_left_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, allocate = [], os.posix_fallocate

    def counted(file: int, offset: int, size: int) -> None:
        made.append(size)
        allocate(file, offset, size)

    monkeypatch.setattr(os, "posix_fallocate", counted)
    [found] = run_threads(offloaded, 1, tmp_path)
    assert len(made) > 2 * 3
    assert all(size > 0 for size in made)
    require_equal([found], run_threads(offloaded, 1, None))
    gc.collect()
    assert not [
        line for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines() if str(tmp_path) in line
    ]
    assert not [*tmp_path.iterdir()]


def cannot(folder: Path, message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        offloaded(folder)


def test_a_folder_that_is_full_or_missing_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_threads(cannot, 1, tmp_path / "none", f"there is no folder {tmp_path / 'none'}: make it first")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    run_threads(cannot, 1, tmp_path, f"offload_folder {tmp_path}: No space left on device, but ")


def on_the_meta_device(folder: Path) -> None:
    with pytest.raises(UsageError, match="offload_folder is for ranks on CPUs, but this one is on meta"):
        offloaded(folder)


def test_files_are_for_cpus(tmp_path: Path) -> None:
    run_threads(on_the_meta_device, 1, tmp_path, device="meta")
