"""The context of a process is seen on all of its threads; where ranks are threads, a foreign thread is told so."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import pipeflow
from pipeflow import UsageError, save_checkpoint
from pipeflow.colossalai.core import global_context
from pipeflow.engine.parallel.context import current_context, in_this_context
from pipeflow.tensor import (
    ColumnParallelLinear,
    Dropout,
    RowParallelLinear,
    VocabParallelCrossEntropy,
    VocabParallelEmbedding,
    checkpoint,
    current_tracker,
    manual_seed,
)
from pipeflow.testing import run_processes, run_threads
from pipeflow.training import get_dataloader, get_dist_logger


def elsewhere(function: Callable[[], Any]) -> Any:
    """What it returns on a thread that knows of nothing."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


def use_everything(folder: str) -> list[Any]:
    """Layers, the loss, dropout and its recompute, a loader and a checkpoint."""
    torch.manual_seed(0)
    manual_seed(3)
    inner = nn.Sequential(ColumnParallelLinear(8, 16), Dropout(0.5, parallel_input=True), RowParallelLinear(16, 8))
    embedding, loss = VocabParallelEmbedding(12, 8), VocabParallelCrossEntropy()
    hidden: Tensor = embedding(torch.arange(6))
    output = checkpoint(inner, hidden)
    head = ColumnParallelLinear(8, 12)
    value = loss(head(output), torch.arange(6))
    value.backward()
    gradients = [parameter.grad for parameter in (*inner.parameters(), *embedding.parameters())]
    loader = get_dataloader(TensorDataset(torch.arange(8)), 2, shuffle=True)
    save_checkpoint(Path(folder), inner)
    files = sorted(str(path.relative_to(folder)) for path in Path(folder).rglob("*"))
    return [value.detach(), *gradients, *(batch for [batch] in loader), files, global_context.get_global_rank()]


def use_on_both(folder: str) -> list[list[Any]]:
    here = use_everything(f"{folder}/here")
    current_context().world.group(range(2)).all_reduce(torch.ones(1)).wait()
    return [here, elsewhere(lambda: use_everything(f"{folder}/there"))]


@pytest.mark.slow
def test_other_threads_of_a_process_compute_the_same(tmp_path: Path) -> None:
    for here, there in run_processes(use_on_both, 2, str(tmp_path), tensor=2):
        assert len(here) == len(there) > 10
        for one, other in zip(here, there, strict=True):
            assert torch.equal(one, other) if isinstance(one, Tensor) else one == other


CALLS: dict[str, Callable[[], object]] = {
    "a context": current_context,
    "a layer": lambda: ColumnParallelLinear(4, 4),
    "a loss": VocabParallelCrossEntropy,
    "dropout": lambda: Dropout(0.5),
    "a seed": lambda: manual_seed(1),
    "a tracker": current_tracker,
    "recompute": lambda: checkpoint(nn.Linear(2, 2), torch.ones(1, 2)),
    "a checkpoint": lambda: save_checkpoint("/nonexistent/never", nn.Linear(2, 2)),
    "a checkpoint to read": lambda: pipeflow.load_checkpoint("/nonexistent/never", nn.Linear(2, 2)),
    "a loader": lambda: get_dataloader(TensorDataset(torch.ones(4)), 2),
    "a log": lambda: get_dist_logger().info("never", ranks=[0]),
    "a pipeline": lambda: pipeflow.Pipeline(nn.Linear(2, 2), pipeflow.make_schedule("gpipe", ranks=1, microbatches=1)),
    "a tie": lambda: pipeflow.PipelineSharedModuleWrapper([0]),
}


@pytest.mark.parametrize("what", CALLS)
def test_a_thread_that_is_no_rank_is_told_so(what: str) -> None:
    def call() -> str:
        with pytest.raises(UsageError, match="this thread has no context") as caught:
            elsewhere(CALLS[what])
        return str(caught.value)

    assert "in_this_context" in run_threads(call, 2)[1]


def test_a_thread_of_a_rank_that_is_a_thread() -> None:
    def rank() -> int:
        return elsewhere(in_this_context(lambda: current_context().rank))  # type: ignore[no-any-return]

    assert run_threads(rank, 3) == [0, 1, 2]


def test_before_any_launch_a_process_is_a_world_of_one() -> None:
    run_threads(lambda: None, 2)
    assert ColumnParallelLinear(4, 4).group.size == 1
    with pytest.raises(UsageError, match="there is no context"):
        current_context()
