"""Plans of published training steps of mixtures of experts, one of which was fitted on."""

from __future__ import annotations

import json

import pytest

from benchmarks.mixtures import BEGIN, END, GUIDE, Step, docs_table, error, steps
from benchmarks.planner_tables import ROOT
from pipeflow import GPT, Setup
from pipeflow.planning.layer_seconds import EXPERT_LAUNCHES, launches


def test_the_guide_has_the_errors_of_the_benchmark() -> None:
    errors = json.loads((ROOT / "benchmarks" / "results" / "mixtures.json").read_text(encoding="utf-8"))["data"][
        "errors"
    ]
    there = GUIDE.read_text(encoding="utf-8").split(BEGIN)[1].split(END)[0]
    assert there == docs_table(errors), "python -m benchmarks mixtures --save writes it anew"


@pytest.mark.slow
@pytest.mark.parametrize("step", steps(), ids=lambda step: step.what)
def test_published_mixtures_are_planned_within_15_percent(step: Step) -> None:
    assert abs(error(step)) < 0.15


def test_experts_take_longer_to_launch_than_one_mlp() -> None:
    """Of a device's experts, up to 16 have products of their own."""
    model = GPT.named("qwen3-235b-a22b")
    assert launches(GPT.named("llama3-8b"), Setup()) == 1
    few, many = (launches(model, Setup(data=128, expert=ranks)) for ranks in (128, 8))
    assert many - few == pytest.approx(15 * EXPERT_LAUNCHES)
    assert launches(model, Setup()) == launches(model, Setup(data=4, expert=4)) == many
    graphs = ("attn", "moe_router", "moe_preprocess")
    assert launches(model, Setup(data=8, expert=8, cuda_graphs=graphs)) == pytest.approx(0.3 * many)
