"""The gradient norm over a pipeline is that of the plain model, in which a tied weight is one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pipeflow import PipelineError, UsageError, clip_grad_norm_, execute_pipeline
from pipeflow.parallel.context import current_context
from pipeflow.testing import run_processes, run_threads
from pipeflow.testing.models import PlainModel, TiedModel, TinyModel
from tests.runtime.work import Gradients, build, gradients_of, require_near, schedule_of

Layout = tuple[str, int, int]
LAYOUTS = [("1f1b", 1, 1), ("interleaved-1f1b", 1, 2), ("1f1b", 2, 1), ("interleaved-1f1b", 2, 2), ("gpipe", 4, 1)]


def run_clipping(model: TinyModel, layout: Layout, max_norms: list[float]) -> list[tuple[float, Gradients]]:
    pipeline = build(model, schedule_of(layout, 3))
    told = []
    for max_norm in max_norms:
        pipeline.zero_grad()
        execute_pipeline(iter([model.batch(7)]), pipeline)
        norm = clip_grad_norm_(pipeline, max_norm)
        assert (norm.dtype, norm.shape) == (torch.float64, ())
        told.append((norm.item(), gradients_of(pipeline)))
    return told


def require_clipped(model: TinyModel, max_norms: list[float], results: list[list[tuple[float, Gradients]]]) -> None:
    for index, max_norm in enumerate(max_norms):
        module = model.stage(0, model.layers)
        _, gradients = model.plain_step(model.batch(7), module)
        norm = torch.nn.utils.clip_grad_norm_(module.parameters(), max_norm)
        assert len({result[index][0] for result in results}) == 1
        for result in results:
            assert result[index][0] == pytest.approx(norm.item(), rel=1e-12)
            require_near(result[index][1], gradients, 1e-5)  # torch adds 1e-6 to the norm it divides by


NORMS = [1e-3, 0.05, 100.0]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("model", [PlainModel(), TiedModel()], ids=str)
def test_threads(model: TinyModel, layout: Layout) -> None:
    require_clipped(model, NORMS, run_threads(run_clipping, layout[1], model, layout, NORMS))


def test_gloo() -> None:
    require_clipped(TiedModel(), NORMS, run_processes(run_clipping, 4, TiedModel(), ("1f1b", 4, 1), NORMS))


def run_without_gradients() -> float:
    pipeline = build(TiedModel(), schedule_of(("1f1b", 2, 1), 2))
    return clip_grad_norm_(pipeline, 1.0).item()


def test_without_gradients_the_norm_is_zero() -> None:
    assert run_threads(run_without_gradients, 2) == [0.0, 0.0]


def run_bad(max_norms: list[Any]) -> str:
    pipeline = build(TiedModel(), schedule_of(("1f1b", 2, 1), 2))
    mine = max_norms[current_context().pipeline_rank]
    with pytest.raises((UsageError, PipelineError)) as caught:
        clip_grad_norm_(pipeline, mine)
    return str(caught.value)


def test_a_norm_that_is_not_positive_is_refused() -> None:
    for bad in (0.0, -1.0, float("nan")):
        assert run_threads(run_bad, 2, [bad, bad]) == [f"max_norm must be positive, got {bad}"] * 2
