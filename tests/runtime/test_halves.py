"""What a pipeline says of split backwards, and what it leaves in `.grad` when."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from pipeflow import Schedule, execute_pipeline
from pipeflow.testing import run_threads
from pipeflow.testing.models import WIDTH, PlainModel
from tests.runtime.work import build, schedule_of

MODEL = PlainModel(4)


def run(name: str) -> dict[int, str]:
    return {stage: str(deferral) for stage, deferral in build(MODEL, schedule_of((name, 2, 1), 4)).deferrals.items()}


def test_what_comes_with_the_inputs_gradient_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="pipeflow"):
        run_threads(run, 2, "1f1b")
        assert not caplog.records
        first, second = run_threads(run, 2, "zb-v")
    assert (sorted(first), sorted(second)) == ([0, 3], [1, 2])
    deferred, whole = WIDTH * WIDTH + WIDTH, WIDTH * WIDTH + 2 * WIDTH
    assert first[0] == (
        f"{deferred} of {whole} elements of weight gradients are deferred (2 parameters); not deferred: layers.0.scale"
    )
    assert sorted(record.getMessage() for record in caplog.records) == sorted(
        f"stage {stage}: {text}" for stage, text in {**first, **second}.items()
    )


def run_watching() -> list[str]:
    """What happens, in its order, under a schedule that leaves the first W until after the second F."""
    schedule = Schedule.from_csv("0F0,0I0,0F1,0W0,0I1,0W1")
    pipeline = build(MODEL, schedule)
    happened: list[str] = []
    layer: Any = pipeline.get_submodule("chunks.0.layers.0")
    layer.register_forward_hook(lambda *_: happened.append("forward"))
    layer.linear.weight.register_post_accumulate_grad_hook(lambda _: happened.append("weight"))
    layer.scale.register_post_accumulate_grad_hook(lambda _: happened.append("scale"))
    execute_pipeline(iter([MODEL.batch(4)]), pipeline)
    return happened


def test_deferred_gradients_come_in_w_and_others_in_i() -> None:
    assert run_threads(run_watching, 1) == [["forward", "scale", "forward", "weight", "scale", "weight"]]
