"""An elastic world goes on without the ranks that died, as one that never had them."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy
import pytest

from pipeflow import Schedule
from pipeflow.testing import run_threads
from pipeflow.testing.models import PlainModel, TiedModel, TinyModel
from tests.covering import some_rows
from tests.runtime.going_on import Death, Trained, of_replica, train, train_table

WHEN = ("read", "forward", "backward", "sums", "agreement", "half of the agreement")


def trained(
    model: TinyModel, deaths: tuple[Death, ...], ranks: int = 4, data: int = 2, **options: Any
) -> list[Trained]:
    def run() -> Trained:
        return train(model, deaths, **options)

    return run_threads(run, ranks, data=data, elastic=True, deadline=90, timeout=20)


def left(results: list[Trained], deaths: tuple[Death, ...]) -> list[Trained]:
    return [result for rank, result in enumerate(results) if rank not in {death.rank for death in deaths}]


def near(losses: list[float | None], expected: list[float | None]) -> bool:
    return all(a is b is None or a == pytest.approx(b, rel=1e-12) for a, b in zip(losses, expected, strict=True))


def require_equal(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    for name in one:
        assert numpy.array_equal(one[name], other[name]), name


CASES = [*product(range(4), WHEN)]


@pytest.mark.parametrize(("rank", "when"), some_rows(CASES, [*zip((0, 1, 2, 3, 1, 2), WHEN, strict=True)]))
def test_ranks_that_are_left_end_the_step_as_if_they_had_their_table_from_its_start(rank: int, when: str) -> None:
    deaths, model = (Death(rank, 1, when),), TiedModel()
    results = left(trained(model, deaths), deaths)
    assert Schedule.of_survivors is not None
    begin = 1 + (when == "half of the agreement")  # since ranks had ended the step, all end it
    table, stages = Schedule.of_survivors(of_replica(2), 2, [rank]), [each.before[begin] for each in results]
    expected = run_threads(train_table, 3, model, table, 2, stages, begin, deadline=60, timeout=20)
    for mine, its in zip(results, expected, strict=True):
        assert mine.losses[begin:] == its.losses
        require_equal(mine.stages, its.stages)


@pytest.mark.parametrize("model", [TiedModel(), PlainModel()], ids=["tied", "plain"])
def test_it_trains_as_without_deaths(model: TinyModel) -> None:
    deaths = (Death(1, 1, "backward"), Death(4, 2, "forward"))
    whole = trained(model, (), 6, 3, momentum=0.9, clips=True, ends=True)
    results = trained(model, deaths, 6, 3, momentum=0.9, clips=True, ends=True)
    for mine, its in zip(results, whole, strict=True):
        if mine is not None:
            assert mine.living == (0, 2, 3, 5)
            assert mine.read == its.read
            assert near(mine.losses, its.losses)
            assert mine.norms == pytest.approx(its.norms, rel=1e-12)
            for name, each in its.stages.items():
                assert numpy.allclose(mine.stages[name], each, rtol=1e-12, atol=1e-14), name
            for output, expected in zip(mine.outputs, its.outputs, strict=True):
                assert output is expected is None or numpy.allclose(output, expected, rtol=1e-12)
