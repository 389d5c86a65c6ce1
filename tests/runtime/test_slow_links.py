"""Over slow links: what an engine that knows of them posts, and that a step stays the same."""

from __future__ import annotations

import pytest

from pipeflow import CostModel, execute_pipeline, make_schedule
from pipeflow.engine.parallel.context import current_context
from pipeflow.engine.parallel.transport.agreement import all_gather
from pipeflow.engine.parallel.transport.local import LocalTransport
from pipeflow.engine.parallel.transport.protocol import Tag, Work
from pipeflow.engine.runtime.program.operations import Doing
from pipeflow.testing import run_threads
from pipeflow.testing.models import WIDTH, PlainModel
from tests.runtime.work import build, gradients_of, require_near

MODEL, GPIPE = PlainModel(), make_schedule("gpipe", ranks=2, microbatches=12)


def posted_first(latency: float) -> int:
    """How many receives this rank posts before it computes anything, in a step whose gradients are right."""
    cost = CostModel.even(GPIPE.placement, transfer=latency)
    pipeline = build(MODEL, GPIPE, cost=cost, tensor_shape=(1, 3, WIDTH), tensor_dtype=MODEL.dtype)
    batch = MODEL.batch(12, length=3)
    execute_pipeline(iter([batch]), pipeline)
    require_near(gradients_of(pipeline), MODEL.plain_step(batch)[1])
    [kept] = pipeline.runner.programs._kept
    posts = [operation.doing is Doing.POST for operation in kept.operations]
    return posts.index(False) if current_context().rank else 0


@pytest.mark.parametrize(("latency", "posts"), [(0, 3), (3, 9)])
def test_receives_are_posted_as_early_as_the_links_of_the_costs_are_slow(latency: float, posts: int) -> None:
    assert run_threads(posted_first, 2, latency) == [0, posts]


class Noting(LocalTransport):
    """Writes down in which order an agreement begins what."""

    def _start(self, key: tuple[int, int, int, Tag], sending: bool, tensors: list[object]) -> Work:  # type: ignore[override]
        self.begun.append(sending)  # type: ignore[attr-defined]
        return super()._start(key, sending, tensors)  # type: ignore[arg-type]


def begun() -> list[bool]:
    transport = current_context().world
    assert isinstance(transport, LocalTransport)
    found: list[bool] = []
    transport.__class__ = Noting
    transport.begun = found  # type: ignore[attr-defined]
    rows = all_gather(transport, [transport.rank, 0.5])
    assert rows == [[rank, 0.5] for rank in range(transport.size)]
    return found


@pytest.mark.parametrize(("ranks", "rounds"), [(2, 1), (4, 2), (5, 3), (8, 3)])
def test_an_agreement_posts_all_of_its_receives_before_it_sends(ranks: int, rounds: int) -> None:
    assert run_threads(begun, ranks) == [[False] * rounds + [True] * rounds] * ranks
