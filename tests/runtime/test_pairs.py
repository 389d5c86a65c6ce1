"""Pairs run as the user's function runs them, or one half after the other."""

from __future__ import annotations

from threading import Thread

import pytest

from pipeflow import PipelineError, Schedule, UsageError, execute_pipeline
from pipeflow.engine.parallel.context import current_context
from pipeflow.engine.runtime.program.pairs import Half, Overlap
from pipeflow.testing import run_threads
from pipeflow.testing.models import PlainModel
from pipeflow.testing.ranks import RankError
from tests.runtime.work import Stepped, build, gradients_of, require_step

MODEL = PlainModel(2)
PAIRED = Schedule.from_csv("0F0,0F1,(0F2;0B0)OVERLAP_F_B,0B1,0B2\n1F0,1B0,1F1,(1F2;1B1)OVERLAP_F_B,1B2", name="paired")
ROWS = [["0F0", "0F1", "0F2", "0B0", "0B1", "0B2"], ["1F0", "1B0", "1F1", "1F2", "1B1", "1B2"]]


def at_once(forward: Half, backward: Half) -> None:
    threads = [Thread(target=half) for half in (forward, backward)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def backward_first(forward: Half, backward: Half) -> None:
    assert (forward.action.kind.value, backward.action.kind.value) == ("F", "B")
    assert forward.module is backward.module
    backward()
    forward()


def run(overlap: Overlap | None) -> tuple[Stepped, list[list[str]], int]:
    pipeline = build(MODEL, PAIRED, overlap=overlap)
    output = execute_pipeline(iter([MODEL.batch(7)]), pipeline, trace=True, broadcast_loss=True)
    assert output.loss is not None
    assert output.timeline is not None
    actions = [[str(span.action) for span in row] for row in output.timeline.rows]
    told = output.loss.item() if 1 in pipeline.schedule.placement.stages_of(pipeline.context.pipeline_rank) else None
    pairs = sum(span.partner is not None for span in output.timeline)
    return Stepped([told], [], gradients_of(pipeline)), actions, pairs


@pytest.mark.parametrize(("overlap", "paired"), [(None, 0), (backward_first, 4), (at_once, 4)])
def test_gradients_are_those_of_the_plain_model(overlap: Overlap | None, paired: int) -> None:
    results = run_threads(run, 2, overlap)
    require_step([stepped for stepped, _, _ in results], MODEL.plain_step(MODEL.batch(7)))
    for _, actions, pairs in results:
        assert actions == ROWS
        assert pairs == paired


def test_a_half_that_was_not_called_is_an_error() -> None:
    with pytest.raises(RankError, match=r"UsageError: overlap.* returned before it had called both"):
        run_threads(run, 2, lambda forward, _: forward())


def test_an_error_names_the_half_that_it_was_in() -> None:
    def failing() -> None:
        pipeline = build(MODEL, PAIRED, overlap=at_first_fail)
        with pytest.raises(PipelineError, match=r"failed in 0B0 .* ZeroDivisionError"):
            execute_pipeline(iter([MODEL.batch(7)]), pipeline)

    def at_first_fail(forward: Half, backward: Half) -> None:
        forward()
        if str(backward.action) == "0B0":
            next(iter(backward.module.parameters())).register_hook(lambda _: 1 // 0)
        backward()

    run_threads(failing, 2)


def test_all_ranks_overlap_or_none() -> None:
    def run() -> None:
        with pytest.raises(UsageError, match="rank 1 was given another overlap than rank 0"):
            build(MODEL, PAIRED, overlap=backward_first if current_context().pipeline_rank else None)

    run_threads(run, 2)
