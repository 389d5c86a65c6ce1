"""Trainer against transformers' own on one process: the same losses, norms, rates, metrics and predictions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
import pytest

from pipeflow.testing import run_processes, run_threads
from tests.huggingface.trainers import train, train_at_random, train_by_length, train_serially

pytest.importorskip("transformers", reason="not installed", exc_type=ImportError)
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
LAYOUTS: dict[str, Any] = {"pipeline": {}, "tensor": {"tensor": 2}, "data": {"data": 2}}
LAYOUTS |= {"experts": {"data": 2, "experts": 2}}
CASES = [("llama", "tensor")]
MORE = [
    ("bert", "data"),
    ("llama", "pipeline"),
    ("llama", "data"),
    ("bert", "pipeline"),
    ("bert", "tensor"),
    ("masked", "data"),
    ("mixtral", "experts"),
]


def require_same(result: Any, expected: Any) -> None:
    (logged, evaluated, predicted), (serially, evaluated_serially, predicted_serially) = result, expected
    steps, steps_serially = ([each for each in log if "loss" in each] for log in (logged, serially))
    assert len(steps) == len(steps_serially) == 20
    for step, one in zip(steps, steps_serially, strict=True):
        assert step["loss"] == pytest.approx(one["loss"], abs=1e-5)
        assert step["grad_norm"] == pytest.approx(one["grad_norm"], abs=1e-5)
        assert (step["learning_rate"], step["epoch"]) == (one["learning_rate"], one["epoch"])
    assert min(step["grad_norm"] for step in steps) > 0.5 or steps[-1]["loss"] < steps[0]["loss"] / 2  # it was clipped
    for name in ("eval_loss", "eval_mean", "eval_samples", "eval_labels"):
        assert evaluated[name] == pytest.approx(evaluated_serially[name], abs=1e-5)
    assert numpy.allclose(predicted, predicted_serially, atol=1e-5)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("kind", "layout"), [*CASES, *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in MORE)]
)
def test_four_ranks_train_as_one_process_does(kind: str, layout: str, tmp_path: Path) -> None:
    expected = train_serially(kind, tmp_path / "serial")
    for result in run_threads(train, 4, kind, tmp_path, deadline=200.0, **LAYOUTS[layout]):
        require_same(result, expected)


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", ["pipeline", pytest.param("data", marks=pytest.mark.exhaustive)])
def test_microbatches_by_length_train_as_one_process_does(layout: str, tmp_path: Path) -> None:
    """Padded to the longest of a microbatch, not of a batch; with accumulated batches, and a last one that is short."""
    expected = train_serially("llama", tmp_path / "serial")
    for result in run_threads(train_by_length, 2 if layout == "pipeline" else 4, "llama", tmp_path, **LAYOUTS[layout]):
        require_same(result, expected)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "layout", ["data", *(pytest.param(layout, marks=pytest.mark.exhaustive) for layout in ("pipeline", "tensor"))]
)
def test_four_processes_train_as_one_does(layout: str, tmp_path: Path) -> None:
    expected = train_serially("llama", tmp_path / "serial")
    for result in run_processes(train, 4, "llama", tmp_path, deadline=300.0, **LAYOUTS[layout]):
        require_same(result, expected)


@pytest.mark.exhaustive
def test_ranks_read_the_same_random_batches_and_drop_out_otherwise(tmp_path: Path) -> None:
    (losses, evaluated, drawn), (same_losses, same, otherwise) = run_processes(
        train_at_random, 2, tmp_path, deadline=200.0
    )
    assert (losses, evaluated) == (same_losses, same)  # the engine raises an error where ranks read other batches
    assert drawn != otherwise
