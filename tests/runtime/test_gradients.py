"""A step of a pipeline gives the loss, the outputs and the gradients of the plain model, in float64."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from pipeflow import Schedule
from pipeflow.testing import run_processes, run_threads
from pipeflow.testing.models import WIDTH, KeywordModel, PlainModel, TiedModel, TinyModel, TreeModel
from tests.covering import covering, halved
from tests.runtime.work import Stepped, each_once, largest, plain, require_step, run_steps, schedule_of, variants

MODELS = {"plain": PlainModel(), "tied": TiedModel(), "keywords": KeywordModel(), "trees": TreeModel()}
MICROBATCHES = range(1, 10)
SHARES = tuple(tuple(MICROBATCHES[first::4]) for first in (0, 2, 1, 3))  # every second one: odd and even numbers


@cache
def expected(model: TinyModel, samples: int) -> tuple[Tensor, dict[str, Tensor]]:
    return model.plain_step(model.batch(samples))


def sized(kind: str, schedule: Schedule) -> TinyModel:
    """The model, with at least a layer a stage."""
    return replace(MODELS[kind], layers=max(2, schedule.placement.num_stages))


@pytest.mark.some(10)
@pytest.mark.parametrize(
    ("variant", "kind", "share"),
    halved(variants(), tuple(MODELS), SHARES, kept=covering(largest(variants()), tuple(MODELS), SHARES)),
)
def test_threads(variant: tuple[str, int, int], kind: str, share: tuple[int, ...]) -> None:
    for microbatches in share:
        schedule = schedule_of(variant, microbatches)
        model, samples = sized(kind, schedule), 2 * microbatches + 1  # the first microbatch is larger
        results = run_threads(run_steps, variant[1], model, schedule, [model.batch(samples)])
        require_step(results, expected(model, samples))


@pytest.mark.some(2)
@pytest.mark.parametrize("variant", each_once(variants()))
def test_threads_with_the_shape_known(variant: tuple[str, int, int]) -> None:
    for microbatches in MICROBATCHES:
        schedule = schedule_of(variant, microbatches)
        model, samples = sized("plain", schedule), 2 * microbatches
        options: dict[str, Any] = {"tensor_shape": (2, 3, WIDTH), "tensor_dtype": torch.float64}
        results = run_threads(run_known, variant[1], model, schedule, samples, options)
        require_step(results, expected(model, samples))


def run_known(model: TinyModel, schedule: Schedule, samples: int, options: dict[str, Any]) -> Stepped:
    return run_steps(model, schedule, [model.batch(samples)], **options)


@pytest.mark.parametrize("kind", MODELS)
def test_outputs_are_those_of_the_plain_model(kind: str) -> None:
    for microbatches in (1, 3, 4):
        for variant in (("gpipe", 2, 1), ("interleaved-1f1b", 2, 2)):
            schedule = schedule_of(variant, microbatches)
            model = sized(kind, schedule)
            inputs, _ = batch = model.batch(7)
            module = model.stage(0, model.layers)
            output = module(**inputs) if isinstance(inputs, dict) else module(inputs)
            first, last = run_threads(run_with_outputs, 2, model, schedule, batch)
            assert first.outputs == [None]
            told, wanted = tree_leaves(last.outputs[0]), tree_leaves(plain(output))
            assert len(told) == len(wanted)
            for mine, its in zip(told, wanted, strict=True):
                assert mine.dtype == its.dtype
                assert abs(mine - its).max() <= 1e-14


def run_with_outputs(model: TinyModel, schedule: Schedule, batch: tuple[object, object]) -> Stepped:
    return run_steps(model, schedule, [batch], return_outputs=True)


@pytest.mark.some(1)
@pytest.mark.parametrize("microbatches", [3, *(pytest.param(m, marks=pytest.mark.exhaustive) for m in (1, 6))])
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.slow
def test_gloo(ranks: int, microbatches: int) -> None:
    every = [variant for variant in variants(max_chunks=2) if variant[1] == ranks]
    kinds = list(MODELS)
    cases = [
        (sized(kind, schedule), schedule, 2 * microbatches + 1)
        for number, variant in enumerate(every)
        for kind in kinds[number % 2 :: 2]  # two for each; threads try all
        for schedule in [schedule_of(variant, microbatches)]
    ]
    columns = run_processes(run_cases, ranks, cases)
    for index, (model, _, samples) in enumerate(cases):
        require_step([column[index] for column in columns], expected(model, samples))


def run_cases(cases: list[tuple[TinyModel, Schedule, int]]) -> list[Stepped]:
    return [run_steps(model, schedule, [model.batch(samples)]) for model, schedule, samples in cases]
