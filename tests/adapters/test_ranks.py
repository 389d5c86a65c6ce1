"""Trees of tensors between ranks: outputs for all stages, and values of all replicas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from pipeflow import PipelineError, UsageError
from pipeflow.adapters.ranks import (
    gathered,
    launched,
    numbers_of_all,
    objects_of_all,
    padded,
    reduced,
    shared_outputs,
    wait_for_all,
)
from pipeflow.engine.parallel.context import Context, current_context
from pipeflow.testing import run_threads


def test_ranks_share_outputs_and_gather_those_of_replicas() -> None:
    def rank() -> Any:
        context = current_context()
        mine = torch.full((1 + context.data_rank, 2 + context.data_rank), float(context.data_rank))
        is_last = context.pipeline_rank == 1
        plain = {"zero": 0, "many": 7, "yes": True, "name": "a", "half": 0.5}
        outputs = (mine, [torch.tensor(3.0), None], plain) if is_last else None
        logits, (loss, nothing), others = shared_outputs(outputs, context)
        assert logits.equal(mine)
        assert (float(loss), nothing, others) == (3.0, None, plain)
        assert others["yes"] is True
        whole = gathered(padded((logits,), context, 1, -100), context)[0]
        return whole.tolist(), gathered(torch.tensor(context.data_rank), context).tolist()

    for whole, ranks in run_threads(rank, 4, data=2):
        assert whole == [[0.0, 0.0, -100.0], [1.0, 1.0, 1.0], [1.0, 1.0, 1.0]]
        assert ranks == [0, 1]


def ask() -> list[Any]:
    context, answers = current_context(), []
    asked: list[Callable[[Context], Any]] = [
        wait_for_all,
        lambda context: numbers_of_all(context, context.rank),
        lambda context: objects_of_all(context, ["a", "b"][context.rank]),
        lambda context: gathered(torch.tensor([context.rank]), context).tolist(),
        lambda context: padded(torch.ones(1, 1 + context.rank), context, -1, 0, at_front=True).tolist(),
        lambda context: [float(reduced(torch.tensor(context.rank), context, how)) for how in ("mean", "sum", "max")],
    ]
    for each in asked:
        with pytest.raises(PipelineError), context.alarm.raised_everywhere():
            raise ArithmeticError
        answers.append(each(context))
    return answers


def test_calls_of_all_ranks_open_channels_after_an_error_that_the_next_step_survives() -> None:
    first, second = run_threads(ask, 2, data=2)
    common = [None, [0.0, 1.0], ["a", "b"], [0, 1]]
    assert first == [*common, [[0.0, 1.0]], [0.5, 1.0, 1.0]]
    assert second == [*common, [[1.0, 1.0]], [0.5, 1.0, 1.0]]


def test_no_script_of_another_library_gets_parts_of_activations() -> None:
    def ask() -> None:
        with pytest.raises(UsageError, match="tensor mode '2d', and this needs mode '1d': launch with tensor_mode"):
            launched(1, 4)

    run_threads(ask, 4, tensor=4, tensor_mode="2d")
