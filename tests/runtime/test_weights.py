"""The loss of a step is the mean over its samples, or over whatever `weigh` counts; and it can be told to all."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from pipeflow import Pipeline, UsageError, execute_pipeline, make_schedule
from pipeflow.engine.parallel.context import current_context
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


def soft(words: Tensor) -> Tensor:
    """Probabilities of words."""
    return functional.softmax(words[..., None] % torch.arange(1.0, WORDS + 1, dtype=torch.float64), dim=-1)


CLASSES = torch.tensor([1.0, 0.2, 3.0, 0.5, 2.0], dtype=torch.float64)
CRITERIA: dict[str, Callable[[], nn.Module]] = {
    "ignored": nn.CrossEntropyLoss,
    "ignored 0": partial(nn.CrossEntropyLoss, ignore_index=0),
    "classes": partial(nn.CrossEntropyLoss, weight=CLASSES),
    "smoothed": partial(nn.CrossEntropyLoss, ignore_index=0, label_smoothing=0.1),
    "negative": partial(nn.NLLLoss, ignore_index=0, weight=CLASSES),
    "sum": partial(nn.CrossEntropyLoss, reduction="sum"),
    "soft": partial(nn.CrossEntropyLoss, weight=CLASSES),
    "squares": nn.MSELoss,
    "sum of squares": partial(nn.MSELoss, reduction="sum"),
    "batch mean": partial(nn.KLDivLoss, reduction="batchmean"),
}


def batch_for(name: str, replica: int) -> tuple[Tensor, Tensor]:
    """Outputs have classes in dim 1."""
    words = labels().roll(replica, dims=0)
    words = torch.where(words < 0, 0, words) if "0" in name or name in ("smoothed", "negative") else words
    if name in ("soft", "squares", "sum of squares", "batch mean"):
        words = soft(words.clamp(min=0)).transpose(1, 2)
    return inputs(torch.float64).transpose(1, 2) * (1 + replica), words


class Turned(nn.Linear):
    def forward(self, hidden: Tensor) -> Tensor:
        return functional.linear(hidden.transpose(1, 2), self.weight, self.bias).transpose(1, 2)


def turned(stage: int) -> Turned:
    made = Turned(WORDS, WORDS, dtype=torch.float64)
    made.load_state_dict(layer(stage, torch.float64).state_dict())
    return made


def run_criterion(name: str, evaluates: bool) -> tuple[float, Tensor | None, int]:
    context = current_context()
    chunk, schedule = turned(context.pipeline_rank), make_schedule("1f1b", ranks=2, microbatches=3)
    pipeline = Pipeline(chunk, schedule, criterion=CRITERIA[name]())
    batch = batch_for(name, context.data_rank)
    output = execute_pipeline(iter([batch]), pipeline, broadcast_loss=True, forward_only=evaluates)
    assert output.loss is not None
    return output.loss.item(), chunk.weight.grad, context.pipeline_rank


@pytest.mark.some(14)
@pytest.mark.parametrize("data", [1, 2])
@pytest.mark.parametrize("name", CRITERIA)
def test_a_loss_module_says_what_counts(name: str, data: int) -> None:
    whole = nn.Sequential(turned(0), turned(1))
    batches = [batch_for(name, replica) for replica in range(data)]
    given, words = (torch.cat(parts) for parts in zip(*batches, strict=True))
    expected = CRITERIA[name]()(whole(given), words)
    expected.backward()
    for evaluates in (False, True):
        for loss, gradient, rank in run_threads(run_criterion, 2 * data, name, evaluates, data=data):
            assert loss == pytest.approx(expected.item(), rel=1e-12)
            if not evaluates:
                torch.testing.assert_close(gradient, whole[rank].weight.grad, rtol=1e-11, atol=1e-13)


class Chosen(nn.CrossEntropyLoss):
    """A loss that takes one of several kinds of labels."""

    def forward(self, output: Tensor, kinds: Any) -> Tensor:
        return super().forward(output, kinds["words"])


def run_chosen() -> float:
    schedule = make_schedule("1f1b", ranks=2, microbatches=3)
    pipeline = Pipeline(turned(current_context().pipeline_rank), schedule, criterion=Chosen())
    given, words = batch_for("chosen", 0)
    output = execute_pipeline(iter([(given, {"words": words.clamp(min=0)})]), pipeline, broadcast_loss=True)
    assert output.loss is not None
    return output.loss.item()


def test_a_loss_module_with_several_kinds_of_labels_is_a_mean_over_samples() -> None:
    given, words = batch_for("chosen", 0)
    assert len(words) % 3
    expected = nn.CrossEntropyLoss()(nn.Sequential(turned(0), turned(1))(given), words.clamp(min=0))
    assert run_threads(run_chosen, 2) == pytest.approx([expected.item()] * 2, rel=1e-12)


def run_without_weight() -> None:
    schedule = make_schedule("gpipe", ranks=1, microbatches=2)
    model = Pipeline(layer(0, torch.float64), schedule, criterion=token_mean, weigh=lambda _: 0)
    with pytest.raises(UsageError, match="sum to zero: no label of this batch counts"):
        execute_pipeline(iter([(inputs(torch.float64), labels())]), model)


def test_a_batch_without_weight_is_refused() -> None:
    run_threads(run_without_weight, 1)
