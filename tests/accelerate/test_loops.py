"""The usual loops on pipeflow's Accelerator, against accelerate's own in one process: the same numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pipeflow.testing import run_processes
from tests.accelerate.loops import BATCH, accelerator_of, make_llama, make_words, train_folds, train_images, train_texts

pytest.importorskip("accelerate", reason="not installed", exc_type=ImportError)
pytest.importorskip("transformers", reason="not installed", exc_type=ImportError)
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
MORE: dict[str, tuple[int, dict[str, Any]]] = {"tensor": (4, {"tensor": 2}), "one": (1, {})}


def require_same(results: list[list[float]], expected: list[float]) -> None:
    for result in results:
        assert len(result) == len(expected)
        assert result == pytest.approx(expected, abs=1e-5)


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", [None, *(pytest.param(each, marks=pytest.mark.exhaustive) for each in MORE)])
def test_texts_train_as_in_one_process(layout: str | None) -> None:
    ranks, sizes = MORE.get(layout or "", (2, {}))
    expected = train_texts("accelerate", BATCH)
    require_same(run_processes(train_texts, ranks, "pipeflow", BATCH, deadline=200.0, **sizes), expected)


@pytest.mark.exhaustive
def test_dropout_leaves_the_data_of_ranks_alike() -> None:
    """The engine raises an error where ranks read other batches."""
    first, second = run_processes(_dropped, 2, deadline=200.0)
    assert first == second


def _dropped() -> list[float]:
    return train_texts("pipeflow", BATCH, dropout=0.3)


@pytest.mark.exhaustive
def test_images_train_as_in_one_process_and_resume_under_another_layout(tmp_path: Path) -> None:
    expected = train_images("accelerate")
    assert expected[-1] < expected[0]
    require_same(run_processes(train_images, 2, "pipeflow", tmp_path / "state", deadline=200.0), expected)
    resumed = run_processes(train_images, 2, "pipeflow", tmp_path / "state", True, deadline=200.0, tensor=2)
    require_same(resumed, expected[len(expected) // 3 :])


@pytest.mark.exhaustive
def test_language_models_are_evaluated_without_their_caches() -> None:
    """Each stage has the keys and values of its own blocks alone."""
    [loss] = evaluated("accelerate")
    assert loss > 0
    for [its] in run_processes(evaluated, 2, "pipeflow", deadline=200.0):
        assert its == pytest.approx(loss, abs=1e-6)


def evaluated(which: str) -> list[float]:
    accelerator = accelerator_of(which)
    model = accelerator.prepare(make_llama()).eval()
    with torch.no_grad():
        outputs = model(**make_words())
    assert (outputs.past_key_values is None) == (which == "pipeflow")
    return [float(outputs.loss)]


@pytest.mark.exhaustive
def test_two_models_train_one_after_the_other_and_each_rank_is_profiled(tmp_path: Path) -> None:
    expected = train_folds("accelerate", tmp_path / "alone")
    require_same(run_processes(train_folds, 2, "pipeflow", tmp_path / "ranks", deadline=200.0), expected)
    assert sorted(each.name for each in (tmp_path / "ranks").iterdir()) == ["profile_0.json", "profile_1.json"]


@pytest.mark.parametrize("ranks", [1])
def test_logits_by_slices_train_as_in_one_process(ranks: int) -> None:
    expected = two_losses("accelerate")
    require_same(run_processes(two_losses, ranks, "pipeflow", 3, deadline=200.0), expected)


def two_losses(which: str, slices: int | None = None) -> list[float]:
    """Before and after a step."""
    accelerator = accelerator_of(which, **({} if slices is None else {"head_slices": slices}))
    model = make_llama()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
    losses = []
    for _ in range(2):
        loss = model.train()(**make_words()).loss
        losses.append(float(loss))
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    return losses
