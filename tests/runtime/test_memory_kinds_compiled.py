"""Recomputed and offloaded microbatches of compiled stages have the same gradients, bit by bit."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from pipeflow import execute_pipeline
from pipeflow.testing import run_threads
from pipeflow.testing.models import TiedModel
from tests.compiling import COMPILED
from tests.runtime.kinds import Gradients, differing, gradients_of, uses_of
from tests.runtime.work import build, schedule_of

Variant = tuple[str, int, int]
VARIANTS = ("1f1b", 2, 1), ("zb-v", 2, 2)
COMPILING: tuple[dict[str, Any], ...] = (
    {"backend": "aot_eager"},
    {"backend": "inductor"},
    {"backend": "aot_eager", "blocks": False},
)

pytestmark = COMPILED


def differ(variant: Variant, compiling: dict[str, Any]) -> list[str]:
    """Of every use of the kinds: where gradients differ."""
    plain = schedule_of(variant, 4)
    model = TiedModel(max(4, plain.placement.num_stages), torch.float32)
    pipeline = build(model, plain)
    pipeline.compile(**compiling)
    expected: Gradients = {}
    wrong = []
    for schedule in uses_of(plain):
        pipeline.zero_grad()
        execute_pipeline(iter([model.batch(8)]), pipeline, schedule=schedule)
        expected = expected or gradients_of(pipeline)
        wrong += differing(schedule, gradients_of(pipeline), expected)
    return wrong


@pytest.mark.exhaustive
@pytest.mark.parametrize(("variant", "compiling"), [*product(VARIANTS, COMPILING)], ids=str)
def test_every_use(variant: Variant, compiling: dict[str, Any]) -> None:
    found = run_threads(differ, variant[1], variant, compiling, deadline=900.0, timeout=300.0)
    assert counters["stats"]["unique_graphs"] > 0
    assert found == [[]] * variant[1]
