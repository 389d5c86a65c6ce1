"""A rank that is killed, or that hangs, is named by every other rank, soon."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeflow import Pipeline, PipelineError, clip_grad_norm_, execute_pipeline
from pipeflow.engine.parallel.context import current_context
from pipeflow.testing import run_processes, run_threads
from pipeflow.testing.models import TiedModel
from tests.covering import some_rows
from tests.runtime.work import schedule_of

SOON = 1.0  # seconds
MODEL = TiedModel()
MICROBATCHES = 6


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's C++ log tells of every broken connection."""
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "FATAL")


@dataclass(frozen=True)
class Told:
    """What a survivor was told, when, and how long its next step took to say it again."""

    message: str
    where: tuple[int, int | None]
    caught: float
    again: list[str]
    again_after: float


class Dying(nn.Module):
    """A stage during whose forward or backward the process is killed."""

    def __init__(self, inner: nn.Module, die: Any, in_forward: int, in_backward: int) -> None:
        super().__init__()
        self.inner = inner
        self.die = die
        self.in_forward = in_forward
        self.in_backward = in_backward

    def forward(self, hidden: Tensor) -> Any:
        self.in_forward -= 1
        if self.in_forward == 0:
            self.die()
        output = self.inner(hidden)
        if output.requires_grad:
            output.register_hook(self.step_back)
        return output

    def step_back(self, _: Tensor) -> None:
        self.in_backward -= 1
        if self.in_backward == 0:
            self.die()


def run_killed(rank: int, when: str, note: str) -> Told | None:
    """Two good steps, then one in which `rank` is killed."""
    context = current_context()
    mine = context.pipeline_rank == rank
    pipeline, second = build_dying(when if mine else "", Path(note)), build_dying("", Path(note))
    batch = MODEL.batch(MICROBATCHES)
    for each in (pipeline, pipeline, second):
        execute_pipeline(iter([batch]), each)
    if mine and when == "between steps":
        kill(Path(note))
    try:
        execute_pipeline(iter([batch]), pipeline)
    except PipelineError as error:
        caught = time.monotonic()
        where = (error.rank, error.died)
        message = str(error)
    again = []
    started = time.monotonic()
    for call in (
        lambda: execute_pipeline(iter([batch]), pipeline),
        lambda: execute_pipeline(iter([batch]), second),
        lambda: clip_grad_norm_(pipeline, 1.0),
    ):
        with pytest.raises(PipelineError) as raised:
            call()
        again.append(str(raised.value))
    return Told(message, where, caught, again, time.monotonic() - started)


def kill(note: Path) -> None:
    note.write_text(str(time.monotonic()), encoding="utf-8")
    os.kill(os.getpid(), signal.SIGKILL)


def build_dying(when: str, note: Path) -> Pipeline:
    schedule = schedule_of(("1f1b", 4, 1), MICROBATCHES)
    chunks = MODEL.chunks(schedule, current_context().pipeline_rank)
    MODEL.tie(chunks, schedule)
    seen = 2 * MICROBATCHES

    def die(*_: object, **__: object) -> None:
        kill(note)

    def criterion(output: Tensor, labels: Tensor) -> Tensor:
        nonlocal seen
        seen -= 1
        if when == "criterion" and seen < 0:
            die()
        return MODEL.criterion(output, labels)

    forward, backward = (2 * MICROBATCHES + 3 if when == kind else 0 for kind in ("forward", "backward"))
    pipeline = Pipeline(Dying(chunks[0], die, forward, backward), schedule, criterion=criterion)
    if when == "tied exchange":
        end = pipeline.gradients.end
        steps: Iterator[Callable[..., None]] = iter([end, end, die])
        pipeline.gradients.end = lambda **options: next(steps)(**options)  # type: ignore[method-assign]
    return pipeline


CASES = [
    *((rank, when) for rank in range(4) for when in ("forward", "backward", "between steps")),
    *((rank, "tied exchange") for rank in (0, 3)),
    (3, "criterion"),
]


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("rank", "when"),
    some_rows(
        CASES, [*enumerate(("forward", "backward", "between steps", "forward")), (0, "tied exchange"), CASES[-1]]
    ),
)
@pytest.mark.slow
def test_a_killed_rank_is_named(rank: int, when: str, tmp_path: Path) -> None:
    note = tmp_path / "killed"
    results = run_processes(run_killed, 4, rank, when, str(note), may_die=[rank])
    killed = float(note.read_text(encoding="utf-8"))
    assert results[rank] is None
    survivors = [told for told in results if told is not None]
    assert len(survivors) == 3
    for told in survivors:
        assert told.where == (rank, rank), told.message
        assert f"rank {rank} died" in told.message
        assert told.caught - killed < SOON
        assert told.again_after < SOON / 2
        assert all(f"rank {rank} died" in again for again in told.again)
    assert multiprocessing.active_children() == []


class Sleeping(nn.Module):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, hidden: Tensor) -> Tensor:
        time.sleep(self.seconds)
        return hidden * self.weight


def run_hanging(rank: int, seconds: float) -> tuple[int, int | None, str, float, float]:
    """A good step, one in which `rank` takes too long, and a good one."""
    mine = current_context().pipeline_rank == rank
    stage = Sleeping(0.0)
    pipeline = Pipeline(stage, schedule_of(("1f1b", 3, 1), 3), criterion=lambda output, _: output.mean())
    batch = (torch.ones(3, 2), None)
    execute_pipeline(iter([batch]), pipeline)
    stage.seconds = seconds if mine else 0.0
    started = time.monotonic()
    with pytest.raises(PipelineError) as caught:
        execute_pipeline(iter([batch]), pipeline)
    took, error, stage.seconds = time.monotonic() - started, caught.value, 0.0
    loss = execute_pipeline(iter([batch]), pipeline, broadcast_loss=True).loss
    assert loss is not None
    return error.rank, error.died, str(error), took, float(loss)


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("start", "hanging"),
    some_rows(product([run_threads, run_processes], range(3)), [*product([run_threads], range(3)), (run_processes, 0)]),
)
def test_who_takes_too_long_is_named_and_the_next_step_works(start: Any, hanging: int) -> None:
    timeout, sleep = (0.7, 1.2) if start is run_threads else (2.0, 3.5)
    results = start(run_hanging, 3, hanging, sleep, timeout=timeout)
    messages = {message for _, _, message, _, _ in results}
    assert len(messages) == 1
    [message] = messages
    told = (
        rf"rank {hanging} failed: it took too long; rank . gave up after {timeout:g} s waiting for the "
        r"(.*) of stage ., microbatch . \(rank .\)"
    )
    assert re.search(told, message) is not None, message
    for rank, (origin, died, _, seconds, loss) in enumerate(results):
        assert (origin, died, loss) == (hanging, None, 1.0)
        assert seconds < (sleep if rank == hanging else timeout) + SOON


def run_late(late: float) -> float:
    """Rank 0 begins the second step `late` seconds after the other one, and takes too long in it; the seconds of the
    step.
    """
    stage, mine = Sleeping(0.0), current_context().pipeline_rank == 0
    pipeline = Pipeline(stage, schedule_of(("1f1b", 2, 1), 2), criterion=lambda output, _: output.mean())
    batch = (torch.ones(2, 2), None)
    execute_pipeline(iter([batch]), pipeline)
    time.sleep(late if mine else 0.0)
    stage.seconds = 6.0 if mine else 0.0
    started = time.monotonic()
    with pytest.raises(PipelineError, match="it took too long"):
        execute_pipeline(iter([batch]), pipeline)
    return time.monotonic() - started


@pytest.mark.some(1)
@pytest.mark.parametrize("start", [run_threads, run_processes])
def test_who_begins_late_and_takes_too_long_is_found_soon(start: Any) -> None:
    """Not after twice the timeout, although the wait began before the call of the rank that is awaited."""
    timeout = 2.0 if start is run_threads else 3.0
    assert 1.2 * timeout < start(run_late, 2, 0.25 * timeout, timeout=timeout)[1] < 1.8 * timeout


def run_busy(seconds: float, where: str) -> float:
    """One rank is busy longer than the timeout, between steps or in its first."""
    stage = Sleeping(0.0)
    pipeline = Pipeline(stage, schedule_of(("1f1b", 2, 1), 2), criterion=lambda output, _: output.mean())
    batch, mine = (torch.ones(2, 2), None), current_context().pipeline_rank == 1
    if where == "between steps":
        execute_pipeline(iter([batch]), pipeline)
        time.sleep(seconds if mine else 0.0)
    elif mine:
        stage.seconds = seconds / 2
    loss = execute_pipeline(iter([batch]), pipeline, broadcast_loss=True).loss
    assert loss is not None
    return float(loss)


@pytest.mark.some(2)
@pytest.mark.parametrize("start", [run_threads, run_processes])
@pytest.mark.parametrize("where", ["between steps", "in the first step"])
def test_who_is_busy_and_lives_is_waited_for(start: Any, where: str) -> None:
    timeout = 0.5 if start is run_threads else 2.0
    assert start(run_busy, 2, 3 * timeout, where, timeout=timeout) == [1.0, 1.0]


def run_leaving(rank: int) -> list[str]:
    """One rank does not come back after a failure."""
    mine = current_context().pipeline_rank
    chunk = Sleeping(0.0)
    pipeline = Pipeline(chunk, schedule_of(("1f1b", 3, 1), 3), criterion=lambda output, _: output.mean())
    batch = (torch.ones(3, 2), None)
    chunk.seconds = -1.0 if mine == 0 else 0.0  # refused by time.sleep
    with pytest.raises(PipelineError):
        execute_pipeline(iter([batch]), pipeline)
    chunk.seconds = 0.0
    if mine == rank:
        return []
    told = []
    for _ in range(2):
        with pytest.raises(PipelineError) as caught:
            execute_pipeline(iter([batch]), pipeline)
        told.append(str(caught.value))
    return told


@pytest.mark.parametrize("leaving", [0, 2])
@pytest.mark.exhaustive
def test_a_rank_that_does_not_try_again_is_missed(leaving: int) -> None:
    for rank, told in enumerate(run_processes(run_leaving, 3, leaving, timeout=3.0)):
        assert len(told) == (0 if rank == leaving else 2)
        assert all("restart the job" in message for message in told)
