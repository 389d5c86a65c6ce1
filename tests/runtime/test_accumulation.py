"""Gradients add up over steps, and are the same to the last bit whatever the schedule."""

from __future__ import annotations

from itertools import pairwise

import numpy
import pytest
import torch

from pipeflow import Placement, Schedule
from pipeflow.testing import run_processes, run_threads
from pipeflow.testing.models import PlainModel, TiedModel, TinyModel, TreeModel
from tests.runtime.work import Stepped, require_near, run_steps, schedule_of, variants

SEVERAL = [("gpipe", 1, 1), ("1f1b", 3, 1), ("interleaved-1f1b", 2, 2), ("interleaved-1f1b", 1, 2)]


@pytest.mark.parametrize("variant", SEVERAL, ids=str)
@pytest.mark.parametrize("model", [PlainModel(), TiedModel()], ids=str)
def test_a_second_step_adds_the_same_again(model: TinyModel, variant: tuple[str, int, int]) -> None:
    schedule, batch = schedule_of(variant, 4), model.batch(9)
    results = run_threads(run_steps, variant[1], model, schedule, [batch, batch])
    _, once = model.plain_step(batch)
    for result in results:
        require_near(result.gradients, {name: 2 * gradient for name, gradient in once.items()})
        assert len(set(result.losses)) == 1


@pytest.mark.parametrize("variant", SEVERAL, ids=str)
def test_different_batches_add_up(variant: tuple[str, int, int]) -> None:
    model, schedule = TiedModel(), schedule_of(variant, 3)
    batches = [model.batch(samples, length=length, seed=samples) for samples, length in ((5, 3), (9, 2), (5, 4))]
    results = run_threads(run_steps, variant[1], model, schedule, batches)
    module = model.stage(0, model.layers)
    for batch in batches:
        _, summed = model.plain_step(batch, module)
    for result in results:
        require_near(result.gradients, summed)


FUSED = pytest.mark.parametrize("fused", [False, True], ids=["", "fused"])


@FUSED
@pytest.mark.exhaustive
@pytest.mark.parametrize("microbatches", [4, *(pytest.param(m, marks=pytest.mark.exhaustive) for m in (1, 7))])
@pytest.mark.parametrize("model", [PlainModel(12, torch.float32), TreeModel(12, torch.float32)], ids=str)
def test_all_layouts_agree_to_the_bit(model: TinyModel, microbatches: int, fused: bool) -> None:
    alike = [
        run_threads(run_two_steps, variant[1], model, schedule_of(variant, microbatches), 2 * microbatches + 1, fused)
        for variant in variants()
        if len(schedule_of(variant, microbatches).placement.paths) == 1  # else two copies sum half of the gradient each
    ]
    require_same_bits(alike)


@FUSED
@pytest.mark.exhaustive
@pytest.mark.parametrize("microbatches", [4, *(pytest.param(m, marks=pytest.mark.exhaustive) for m in (1, 7))])
def test_all_layouts_with_a_weight_tied_across_ranks_agree_to_the_bit(microbatches: int, fused: bool) -> None:
    model = TiedModel(12, torch.float32)
    alike = [
        run_threads(run_two_steps, variant[1], model, schedule_of(variant, microbatches), 2 * microbatches + 1, fused)
        for variant in variants()
        if is_tied_across_ranks(schedule_of(variant, microbatches).placement)
    ]
    require_same_bits(alike)


def is_tied_across_ranks(placement: Placement) -> bool:
    """Whether the first and the last stage are on two ranks, as copies of one weight; else they have one object. The
    copies of a bidirectional stage each see half of the microbatches.
    """
    return len(placement.paths) == 1 and placement.rank_of(0) != placement.rank_of(placement.num_stages - 1)


@pytest.mark.some(1)
@pytest.mark.parametrize("model", [PlainModel(8, torch.float32), TiedModel(8, torch.float32)], ids=str)
@pytest.mark.slow
def test_gloo_agrees_with_threads_to_the_bit(model: TinyModel) -> None:
    every = [schedule_of(variant, 5) for variant in variants(max_chunks=2) if variant[1] == 4]
    schedules = [schedule for schedule in every if is_tied_across_ranks(schedule.placement)]
    columns = run_processes(run_all, 4, model, schedules)
    over_gloo = [[column[index] for column in columns] for index in range(len(schedules))]
    require_same_bits([run_threads(run_two_steps, 2, model, schedule_of(("1f1b", 2, 1), 5), 11), *over_gloo])


@pytest.mark.parametrize("data", [1, 2])
def test_fused_products_have_the_same_bits_in_whole_backwards_and_in_halves(data: int) -> None:
    """Each microbatch has so many rows that a product that is added to a gradient is rounded in another way."""
    model, tensors = PlainModel(4, torch.float32), []
    for variant in (("1f1b", 2, 1), ("gpipe", 1, 1), ("zb-h1", 2, 1), ("zb-v", 2, 2), ("interleaved-1f1b", 2, 2)):
        schedule = schedule_of(variant, 3)
        tensors.append(run_threads(run_long_steps, data * variant[1], model, schedule, True, data=data))
    require_same_bits(tensors)
    [plain] = run_threads(run_long_steps, 1, model, schedule_of(("gpipe", 1, 1), 3), False)
    if data == 1:
        [fused] = tensors[1]
        assert any((fused.gradients[name] != each).any() for name, each in plain.gradients.items())


def run_long_steps(model: TinyModel, schedule: Schedule, fused: bool) -> Stepped:
    batches = [model.batch(12, length=300, seed=seed) for seed in range(2)]
    return run_steps(model, schedule, batches, gradient_accumulation_fusion=fused)


def run_two_steps(model: TinyModel, schedule: Schedule, samples: int, fused: bool = False) -> Stepped:
    batches = [model.batch(samples), model.batch(samples, seed=1)]
    return run_steps(model, schedule, batches, gradient_accumulation_fusion=fused)


def run_all(model: TinyModel, schedules: list[Schedule]) -> list[Stepped]:
    return [run_two_steps(model, schedule, 11) for schedule in schedules]


def require_same_bits(alike: list[list[Stepped]]) -> None:
    """The losses, and the gradients of all ranks together, have the same bits in every run."""
    losses = [[result.losses for result in run if None not in result.losses] for run in alike]
    gradients = [{name: gradient for result in run for name, gradient in result.gradients.items()} for run in alike]
    for here, there in pairwise(losses):
        assert here == there
    for mine, others in pairwise(gradients):
        assert mine.keys() == others.keys()
        for name, gradient in mine.items():
            assert gradient.dtype == numpy.float32
            off = abs(gradient - others[name]).max()
            assert gradient.tobytes() == others[name].tobytes(), f"{name} differs by {off}"
