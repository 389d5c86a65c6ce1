"""Ranks that are threads: what they cannot share."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

from pipeflow import Pipeline, PipelineError, UsageError, execute_pipeline, make_schedule
from pipeflow.engine.parallel.context import context_if_launched, current_context, in_this_context
from pipeflow.engine.runtime.program import microbatches
from pipeflow.tensor import ColumnParallelLinear, RowParallelLinear
from pipeflow.testing import RankError, run_threads


@pytest.mark.parametrize("device", ["cuda", "cuda:1", "xpu"])
def test_tensor_ranks_on_a_device_with_one_autograd_thread_are_refused(device: str) -> None:
    with pytest.raises(UsageError, match=f"tensor ranks that are threads cannot share {device}: autograd runs"):
        run_threads(lambda: None, 2, tensor=2, device=device)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_tensor_ranks_elsewhere_are_not(device: str) -> None:
    assert run_threads(lambda: device, 2, tensor=2, device=device) == [device] * 2


def test_a_rank_that_hangs_leaves_no_context_behind() -> None:
    """The thread itself cannot be ended."""
    go_on, ended = threading.Event(), threading.Event()

    def hang() -> None:
        if current_context().rank == 1:
            go_on.wait()
            ended.set()

    with pytest.raises(RankError, match=r"rank 1 hangs:(?s:.)*go_on\.wait"):
        run_threads(hang, 2, deadline=0.2)
    try:
        assert context_if_launched() is None
        assert run_threads(lambda: current_context().rank, 2) == [0, 1]
    finally:
        go_on.set()
        assert ended.wait(30)


def step() -> str:
    layers = [kind(4, 4) for _ in range(2) for kind in (ColumnParallelLinear, RowParallelLinear)]
    schedule = make_schedule("1f1b", ranks=1, microbatches=1)
    model = Pipeline(nn.Sequential(*layers), schedule, criterion=nn.functional.mse_loss)
    try:
        execute_pipeline(iter([(torch.ones(2, 4), torch.zeros(2, 4))]), model)
    except PipelineError as error:
        return str(error)
    return ""


def test_one_autograd_thread_for_all_tensor_ranks_would_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU; here a thread stands for autograd's. The first step may take ten times the timeout."""
    backward: Callable[..., Any] = vars(microbatches)["run_backward"]
    assert run_threads(step, 2, tensor=2) == ["", ""]
    with ThreadPoolExecutor(1) as of_the_device:

        def elsewhere(*arguments: Any, **options: Any) -> None:
            of_the_device.submit(in_this_context(backward), *arguments, **options).result()

        monkeypatch.setattr(microbatches, "run_backward", elsewhere)
        for told in run_threads(step, 2, tensor=2, timeout=0.1):
            assert "in a collective of ranks [0, 1]" in told
