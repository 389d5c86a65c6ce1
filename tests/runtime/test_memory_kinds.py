"""Recomputed and offloaded microbatches have the same gradients, bit by bit."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import pytest

from pipeflow import Schedule
from pipeflow.testing import run_threads
from pipeflow.testing.models import KeywordModel, PlainModel, TiedModel, TinyModel, TreeModel
from tests.covering import covering, some_rows
from tests.runtime import kinds
from tests.runtime.work import Stepped, largest, run_steps, schedule_of, variants

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


@pytest.mark.some(30)
@pytest.mark.parametrize(("variant", "use", "kind", "data"), some_rows(product(*COLUMNS), covering(*COLUMNS)))
def test_every_schedule(variant: Variant, use: str, kind: str, data: int) -> None:
    schedule = kinds.with_kinds(schedule_of(variant, 5), use)
    require_equal(stepped(kind, variant, schedule, data), expected(kind, variant, data))
