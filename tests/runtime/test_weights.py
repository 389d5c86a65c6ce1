"""The loss of a step is the mean over its samples, or over whatever `weigh` counts; and it can be told to all."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from pipeflow import Pipeline, UsageError, execute_pipeline, make_schedule
from pipeflow.parallel.context import current_context
from pipeflow.testing import run_threads

WORDS, SAMPLES, LENGTH, PADDING = 5, 7, 6, -100


def labels() -> Tensor:
    """Sentences of different lengths, padded."""
    words = torch.arange(SAMPLES * LENGTH).reshape(SAMPLES, LENGTH) % WORDS
    lengths = torch.tensor([[6], [1], [4], [2], [6], [3], [1]])
    return torch.where(torch.arange(LENGTH) < lengths, words, PADDING)


def inputs(dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(SAMPLES, LENGTH, WORDS, generator=generator, dtype=torch.float64).to(dtype)


def layer(stage: int, dtype: torch.dtype) -> nn.Linear:
    made = nn.Linear(WORDS, WORDS, dtype=dtype)
    with torch.no_grad():
        made.weight.copy_(torch.eye(WORDS) + 0.1 * (stage + 1))
        made.bias.fill_(0.01)
    return made


def token_mean(output: Tensor, words: Tensor) -> Tensor:
    return functional.cross_entropy(output.flatten(0, 1), words.flatten(), ignore_index=PADDING)


def tokens(words: Tensor) -> int:
    return int((words != PADDING).sum())


def run_weighed(dtype: torch.dtype) -> tuple[Tensor | None, Tensor]:
    rank = current_context().pipeline_rank
    chunk = layer(rank, dtype)
    schedule = make_schedule("1f1b", ranks=2, microbatches=3)
    model = Pipeline(chunk, schedule, criterion=token_mean, weigh=tokens)
    output = execute_pipeline(iter([(inputs(dtype), labels())]), model, broadcast_loss=True)
    assert chunk.weight.grad is not None
    return output.loss, chunk.weight.grad


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_mean_over_tokens_is_that_of_the_whole_batch(dtype: torch.dtype) -> None:
    plain = nn.Sequential(layer(0, dtype), layer(1, dtype))
    expected = token_mean(plain(inputs(dtype)), labels())
    expected.backward()
    near = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2}[dtype]
    (first, first_gradient), (second, second_gradient) = run_threads(run_weighed, 2, dtype)
    assert first.dtype == second.dtype == torch.promote_types(dtype, torch.float32)  # parts add up in no fewer bits
    assert first == second
    assert first.item() == pytest.approx(expected.item(), rel=near)
    for mine, part in ((first_gradient, plain[0]), (second_gradient, plain[1])):
        torch.testing.assert_close(mine, part.weight.grad, rtol=near, atol=near)


def run_without_weight() -> None:
    schedule = make_schedule("gpipe", ranks=1, microbatches=2)
    model = Pipeline(layer(0, torch.float64), schedule, criterion=token_mean, weigh=lambda _: 0)
    with pytest.raises(UsageError, match="sum to zero: no label of this batch counts"):
        execute_pipeline(iter([(inputs(torch.float64), labels())]), model)


def test_a_batch_without_weight_is_refused() -> None:
    run_threads(run_without_weight, 1)
