"""A stage may wait for what pipeflow did not start: collectives of torch's own groups, or another library. A failure
ends these waits, too, and what they leave behind is not mixed up with what comes next.
"""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from pipeflow import Pipeline, PipelineError, UsageError, execute_pipeline, make_schedule
from pipeflow.core.errors import Failure
from pipeflow.engine.parallel.context import current_context
from pipeflow.engine.parallel.control import rescue
from pipeflow.engine.parallel.control.rescue import Rescue
from pipeflow.engine.parallel.transport.distributed import Begun, unlike
from pipeflow.testing import run_processes

TIMEOUT = 10.0  # seconds, in which channels open on a busy machine
BATCH = (torch.ones(2, 2), torch.zeros(2, 2))


class Stage(nn.Module):
    """Does something before its forward."""

    def __init__(self, happens: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.happens = happens

    def forward(self, hidden: Tensor) -> Tensor:
        inner: Tensor = self.inner(self.happens(hidden))
        return inner


def build(happens: Callable[[Tensor], Tensor]) -> Pipeline:
    schedule = make_schedule("1f1b", ranks=current_context().pipeline_size, microbatches=2)
    return Pipeline(Stage(happens), schedule, criterion=nn.functional.mse_loss)


def stop(what: str, folder: str) -> tuple[int | None, str]:
    """The last rank stops itself in its stage. When all others were told, rank 0 lets it go on, and all step again."""
    context, armed, notes = current_context(), False, Path(folder)
    last = context.world_size - 1

    def happens(hidden: Tensor) -> Tensor:
        if armed and context.rank == last:
            (notes / "pid").write_text(f"{os.getpid()}", encoding="utf-8")
            (notes / "pid").rename(notes / "stopped")
            os.kill(os.getpid(), signal.SIGSTOP)
        if what == "a collective":
            dist.all_reduce(hidden.detach().clone())
        return hidden

    model = build(happens)
    if what == "fully_shard":
        # its replica gathers the weights in the forward, after the rank has stopped
        fully_shard(model.chunks[0].get_submodule("inner"), mesh=context.mesh["data"])
        model = Pipeline(model.chunks[0], model.schedule, criterion=nn.functional.mse_loss)
    execute_pipeline(iter([BATCH]), model)
    armed = True
    with pytest.raises(PipelineError) as caught:
        execute_pipeline(iter([BATCH]), model)
    armed = False
    (notes / f"told-{context.rank}").touch()
    while len(list(notes.glob("told-*"))) < last:
        time.sleep(0.05)
    if context.rank == 0:
        os.kill(int((notes / "stopped").read_text(encoding="utf-8")), signal.SIGCONT)
    with pytest.raises(UsageError) as again:
        execute_pipeline(iter([BATCH]), model)
    return caught.value.rank, str(again.value)


@pytest.mark.slow
@pytest.mark.parametrize(("what", "ranks"), [("fully_shard", 4), ("a collective", 2)])
def test_a_collective_with_a_stopped_rank_ends(what: str, ranks: int, tmp_path: Path) -> None:
    """Of two ranks, only one waits, and not for a channel of pipeflow's."""
    told = run_processes(stop, ranks, what, str(tmp_path), timeout=TIMEOUT, data=2)
    for named, again in told[:-1]:
        assert named == ranks - 1
        assert "closed torch's process groups after the failure" in again
    assert {again for _, again in told} == {told[0][1]}


def wait_elsewhere(folder: str) -> None:
    """Rank 1 dies in its stage while rank 0 waits in its own for something that is not torch's."""
    monitor, victim = current_context().world.monitor, current_context().rank == 1  # type: ignore[attr-defined]

    def end(text: str) -> None:
        Path(folder, "said").write_text(text, encoding="utf-8")
        os._exit(1)

    def happens(hidden: Tensor) -> Tensor:
        if not victim:
            threading.Event().wait()
        os.kill(os.getpid(), signal.SIGKILL)
        return hidden

    monitor.rescue.end = end
    execute_pipeline(iter([BATCH]), build(happens))


@pytest.mark.exhaustive
def test_a_process_in_a_wait_that_nothing_ends_exits(tmp_path: Path) -> None:
    assert run_processes(wait_elsewhere, 2, str(tmp_path), timeout=TIMEOUT, data=2, may_die=[0, 1]) == [None, None]
    assert re.match(
        r"PipelineError: rank 1 died: .*\nRank 0 waits in a call", Path(tmp_path, "said").read_text(encoding="utf-8")
    )


def begin_alone() -> list[str]:
    """Rank 0 begins a collective without rank 1, which raises an error; then both step again."""
    wrong, rank = True, current_context().rank

    def happens(hidden: Tensor) -> Tensor:
        if wrong and rank == 1:
            raise ArithmeticError
        dist.all_reduce(hidden.detach().clone(), async_op=True)
        return hidden

    model, said = build(happens), []
    for _ in range(3):
        with pytest.raises((PipelineError, UsageError)) as caught:
            execute_pipeline(iter([BATCH]), model)
        wrong = False
        said.append(str(caught.value))
    return said


@pytest.mark.exhaustive
def test_collectives_that_only_some_have_begun_are_not_paired_with_later_ones() -> None:
    for first, *then in run_processes(begin_alone, 2, timeout=TIMEOUT, data=2):
        assert "ArithmeticError" in first
        assert all(
            "the failure has left torch's process groups at different collectives: rank 0" in each for each in then
        )


def test_groups_are_compared_among_their_own_ranks() -> None:
    pair = (0, 1)
    first, same = Begun(0, {"a": (pair, 3), "b": ((0, 2), 1)}), Begun(1, {"a": (pair, 3), "b": ((1, 3), 9)})
    assert unlike([first, same]) == ""
    assert unlike([first, Begun(1, {"a": (pair, 4)})]) == "rank 0 has begun 3 collectives, rank 1 4 (ranks [0, 1])"
    assert unlike([first, Begun(1, {})]) == ""


class Clock:
    """A clock, and the time for which the process has computed."""

    def __init__(self) -> None:
        self.now = self.computed = 0.0

    def monotonic(self) -> float:
        return self.now

    def process_time(self) -> float:
        return self.computed


DEAD, WRONG = Failure(1, "gone", died=1), Failure(1, "ValueError", number=3)


@pytest.mark.parametrize(
    ("failure", "busy", "closes", "ends"),
    [
        (DEAD, False, 2, 4),  # soon after the failure, and soon after that
        (DEAD, True, 2, 22),  # a process that computes has its patience
        (WRONG, False, 20, 40),  # another rank's error: it lives, so the wait may end
        (Failure(0, "it took too long"), False, 20, 40),  # this rank
    ],
)
def test_measures_wait_as_long_as_they_may(
    failure: Failure, busy: bool, closes: int, ends: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, done = Clock(), []
    monkeypatch.setattr(rescue, "time", clock)
    one = Rescue(0, soon=1.5)
    one.close = lambda: done.append(("closes", clock.now))
    one.end = lambda _: done.append(("ends", clock.now))
    one.begin(failure, patience=19.5)
    for now in range(1, ends + 1):
        clock.now, clock.computed = float(now), busy * float(now)
        one.begin(failure, patience=19.5)  # told again
        one.look()
    assert done == [("closes", closes), ("ends", ends)]
