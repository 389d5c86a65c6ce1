"""What the ranks of a job write when an error ends their scripts: one copy of it, without pipeflow's own frames."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from pipeflow import UsageError, make_schedule
from pipeflow.engine.parallel.context import current_context
from pipeflow.engine.parallel.failure import _Hook
from pipeflow.engine.parallel.transport.agreement import all_gather
from pipeflow.testing import run_threads


def written(capsys: pytest.CaptureFixture[str], rank: int, error: BaseException) -> str:
    """What the process of a rank writes that this error ends."""
    capsys.readouterr()
    _Hook(sys.__excepthook__, rank)(type(error), error, error.__traceback__)
    return capsys.readouterr().err


def fail(failing: tuple[int, ...], error: Exception) -> None:
    context = current_context()
    with context.alarm.raised_everywhere():
        if context.rank in failing:
            raise type(error)(*error.args)
        all_gather(context.world, [0.0])


def error_of_rank(failing: tuple[int, ...], error: Exception) -> BaseException:
    with pytest.raises(Exception, match="too many") as caught:
        fail(failing, error)
    return caught.value


@pytest.mark.parametrize(("failing", "error"), [((0, 1, 2), UsageError("too many")), ((1,), ValueError("too many"))])
def test_one_rank_writes_an_error_of_all_ranks(
    capsys: pytest.CaptureFixture[str], failing: tuple[int, ...], error: Exception
) -> None:
    texts = [written(capsys, rank, each) for rank, each in enumerate(run_threads(error_of_rank, 3, failing, error))]
    [first] = [rank for rank, text in enumerate(texts) if "Traceback" in text]
    line = f"since rank {first} failed: {type(error).__name__}: too many\n"
    assert [text for rank, text in enumerate(texts) if rank != first] == [
        f"rank {rank} ends, {line}" for rank in range(3) if rank != first
    ]


def test_a_traceback_of_a_usage_error_ends_in_the_callers_code(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UsageError) as caught:
        make_schedule("1f1b", ranks=0, microbatches=1)
    *_, code, line = written(capsys, 0, caught.value).rstrip().splitlines()
    assert "ranks" in line
    assert "make_schedule" in code or set(code.strip()) <= {"^", "~"}


@pytest.mark.parametrize(
    ("show", "hints"), [(lambda output: f"{output.loss:.4f}", True), (lambda output: f"{output.weight:.4f}", False)]
)
def test_a_loss_that_is_none_is_explained(
    capsys: pytest.CaptureFixture[str], show: Callable[[object], str], hints: bool
) -> None:
    with pytest.raises(TypeError) as caught:
        show(SimpleNamespace(loss=None, weight=None))
    assert ("pass broadcast_loss=True" in written(capsys, 0, caught.value)) is hints


@pytest.mark.parametrize(
    ("show", "hints"), [(lambda output: output.outputs.argmax(), True), (lambda output: output.timeline.rows, False)]
)
def test_outputs_that_are_none_are_explained(
    capsys: pytest.CaptureFixture[str], show: Callable[[object], object], hints: bool
) -> None:
    with pytest.raises(AttributeError, match="NoneType") as caught:
        show(SimpleNamespace(outputs=None, timeline=None))
    assert ("None without return_outputs=True" in written(capsys, 0, caught.value)) is hints
