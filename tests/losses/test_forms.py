"""However a loss is written, microbatches add up to what one process computes, or a step says what to write."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeflow import Pipeline, UsageError, execute_pipeline, make_schedule
from pipeflow.engine.parallel.context import current_context
from pipeflow.testing import run_threads
from tests.losses.forms import (
    CLASSES,
    FOUND,
    LENGTH,
    WHOLE,
    Loss,
    counted,
    mean_ce,
    multi_label_margin,
    normalized_mask,
    perplexity,
    with_z_loss,
    with_z_loss_of_all,
)
from tests.losses.forms import sum_over_read as read_count
from tests.losses.words import Words, batch_of


def whole(loss: Loss, words: Tensor, targets: Tensor) -> tuple[float, dict[str, Tensor]]:
    module = Words(loss)
    value = loss(module(words), targets)
    value.backward()
    return value.item(), {name: each.grad for name, each in module.named_parameters() if each.grad is not None}


def step(loss: Loss, batch: object, microbatches: int, schedule: str = "1f1b", **options: Any) -> Any:
    made = make_schedule(schedule, ranks=2, microbatches=microbatches)
    pipeline = Pipeline.from_module(Words(loss), made, batch, **options)
    output = execute_pipeline(iter([batch]), pipeline, broadcast_loss=True)
    assert output.loss is not None
    return output.loss.item(), {name: each.grad for name, each in pipeline.named_parameters()}


def require_whole(loss: Loss, results: list[Any], batch: tuple[Tensor, Tensor]) -> None:
    expected, gradients = whole(loss, *batch)
    found = {name: each for _, own in results for name, each in own.items()}
    assert results[0][0] == pytest.approx(expected, rel=1e-9)
    for name, gradient in gradients.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-9, atol=1e-11)


def case(loss: Callable[..., object]) -> str:
    return getattr(loss, "__name__", "")


@pytest.mark.some(8)
@pytest.mark.parametrize("samples", [7, 6])
@pytest.mark.parametrize("loss", FOUND, ids=case)
def test_a_modules_own_loss_is_that_of_the_whole_batch(loss: Loss, samples: int) -> None:
    """With one sample in a microbatch, too, where numbers of samples are hard to tell from others."""
    words, targets = batch_of(samples)
    microbatches = 3 if samples == 7 else samples
    results = run_threads(step, 2, loss, {"idx": words, "targets": targets}, microbatches)
    require_whole(loss, results, (words, targets))


@pytest.mark.some(6)
@pytest.mark.parametrize("loss", FOUND, ids=case)
def test_a_criterion_is_that_of_the_whole_batch(loss: Loss) -> None:
    batch = batch_of(7)
    require_whole(loss, run_threads(with_criterion, 2, loss, batch), batch)


def with_criterion(loss: Loss, batch: object) -> Any:
    return step(loss, batch, 3, criterion=loss)


@pytest.mark.some(4)
@pytest.mark.parametrize("loss", FOUND, ids=case)
def test_a_criterion_of_a_stage_of_ones_own_is_that_of_the_whole_batch(loss: Loss) -> None:
    """Its weights are found when the first output comes."""
    batch = batch_of(7)

    def rank() -> Any:
        stage = Words(loss)
        output = execute_pipeline(
            iter([batch]), Pipeline(stage, make_schedule("gpipe", ranks=1, microbatches=3), criterion=loss)
        )
        assert output.loss is not None
        return output.loss.item(), {name: each.grad for name, each in stage.named_parameters() if each.grad is not None}

    require_whole(loss, run_threads(rank, 1), batch)


@pytest.mark.parametrize("is_cut", [False, True])
def test_terms_with_divisors_of_their_own_are_evaluated(is_cut: bool) -> None:
    batch, made = batch_of(7), make_schedule("gpipe", ranks=1, microbatches=3)

    def rank() -> float:
        stage = Words(with_z_loss_of_all)
        options: Any = {"criterion": with_z_loss_of_all}
        pipeline = Pipeline.from_module(stage, made, batch, **options) if is_cut else Pipeline(stage, made, **options)
        output = execute_pipeline(iter([batch]), pipeline, forward_only=True)
        assert output.loss is not None
        return output.loss.item()

    assert run_threads(rank, 1) == pytest.approx([whole(with_z_loss_of_all, *batch)[0]], rel=1e-9)


@pytest.mark.parametrize("loss", [mean_ce, multi_label_margin, with_z_loss], ids=case)
def test_replicas_with_other_numbers_of_samples_compute_the_loss_of_all(loss: Loss) -> None:
    """One of them has microbatches of one sample, in which constants are read otherwise."""
    words, targets = batch_of(11)

    def rank() -> Any:
        batches = [(words[:7], targets[:7]), (words[7:], targets[7:])]
        made = make_schedule("1f1b", ranks=2, microbatches=3)
        pipeline = Pipeline.from_module(Words(loss), made, batches[0], criterion=loss)
        output = execute_pipeline(iter([batches[current_context().data_rank]]), pipeline, broadcast_loss=True)
        assert output.loss is not None
        return output.loss.item(), {name: each.grad for name, each in pipeline.named_parameters()}

    require_whole(loss, run_threads(rank, 4, data=2), (words, targets))


@pytest.mark.parametrize("loss", WHOLE, ids=case)
def test_what_is_no_sum_over_samples_is_an_error_and_may_be_computed_at_once(loss: Loss) -> None:
    batch = batch_of(7)
    run_threads(require_refused, 2, loss, batch)
    require_whole(loss, run_threads(at_once, 2, loss, batch), batch)


def require_refused(loss: Loss, batch: object) -> None:
    with pytest.raises(UsageError, match=r'Pass weigh=.*loss_over="batch"'):
        step(loss, batch, 3, criterion=loss)


def at_once(loss: Loss, batch: object) -> Any:
    return step(loss, batch, 3, "gpipe", criterion=loss, loss_over="batch")


def test_a_number_that_was_read_may_equal_a_size_in_the_first_batch() -> None:
    """All words of the example count, so their number says nothing; that of the next batch does."""
    words, targets = batch_of(7)

    def rank() -> Any:
        made = make_schedule("1f1b", ranks=2, microbatches=3)
        full = {"idx": words, "targets": words}
        pipeline = Pipeline.from_module(Words(read_count), made, full)
        execute_pipeline(iter([full]), pipeline)
        pipeline.zero_grad()
        batch = {"idx": words, "targets": targets}
        output = execute_pipeline(iter([batch]), pipeline, broadcast_loss=True)
        assert output.loss is not None
        return output.loss.item(), {name: each.grad for name, each in pipeline.named_parameters()}

    require_whole(read_count, run_threads(rank, 2), (words, targets))


def test_weigh_takes_the_place_of_what_is_read() -> None:
    words, targets = batch_of(7)
    [(loss, _), _] = run_threads(weighed, 2, (words, targets))
    module = Words(perplexity)
    parts = zip(words.tensor_split(3), targets.tensor_split(3), strict=True)
    losses, counts = zip(*((perplexity(module(idx), its), counted(its)) for idx, its in parts), strict=True)
    expected = sum(one * count for one, count in zip(losses, counts, strict=True)) / sum(counts)
    assert loss == pytest.approx(expected.item(), rel=1e-12)


def weighed(batch: object) -> Any:
    return step(perplexity, batch, 3, criterion=perplexity, weigh=counted)


def wrong_weigh() -> None:
    words, targets = batch_of(7)
    with pytest.raises(UsageError, match=r"weigh gets the entries \['idx', 'targets'\], since none is called labels"):
        step(mean_ce, {"idx": words, "targets": targets}, 3, weigh=counted)


def test_a_weigh_for_labels_that_gets_entries_is_told_so() -> None:
    run_threads(wrong_weigh, 2)


@pytest.mark.parametrize("microbatches", [1, 3])
def test_a_criterion_without_labels_is_told_how_to_pass_them(microbatches: int) -> None:
    """Its error may name other things than None."""

    def rank() -> None:
        words, targets = batch_of(6)
        with pytest.raises(UsageError, match=r"None as labels, .*'bool' .*: pass \(inputs, labels\), call their entry"):
            step(mean_ce, {"idx": words, "targets": targets}, microbatches, criterion=normalized)

    run_threads(rank, 2)


def normalized(output: tuple[Tensor, Tensor], labels: Tensor) -> Tensor:
    return normalized_mask(output[0], labels)


class Counting:
    """A criterion that counts its calls, as a penalty that warms up does."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, output: Tensor, labels: Tensor) -> Tensor:
        self.calls += 1
        return mean_ce(output, labels)


def test_a_criterion_is_called_once_for_each_microbatch() -> None:
    def rank() -> list[int]:
        criterion, calls = Counting(), []
        pipeline = Pipeline(nn.Linear(8, CLASSES), make_schedule("1f1b", ranks=1, microbatches=4), criterion=criterion)
        for _ in range(2):
            execute_pipeline(iter([(torch.randn(8, LENGTH, 8), batch_of(8)[1])]), pipeline)
            calls.append(criterion.calls)
        return calls

    assert run_threads(rank, 1) == [[4, 8]]


@pytest.mark.parametrize(
    ("schedule", "criterion", "message"),
    [("1f1b", mean_ce, "whose last stage runs all forwards first"), ("gpipe", None, "needs criterion=")],
)
def test_a_whole_loss_that_is_not_possible_is_told(schedule: str, criterion: Any, message: str) -> None:
    def rank() -> None:
        batch = batch_of(7)
        given: object = batch if criterion else {"idx": batch[0], "targets": batch[1]}
        with pytest.raises(UsageError, match=message):
            step(mean_ce, given, 3, schedule, criterion=criterion, loss_over="batch")

    run_threads(rank, 2)
