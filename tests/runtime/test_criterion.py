"""What a criterion divides by is read from its operators, in a pipeline of chunks, too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import all_reduce
from torch.nn import functional

from pipeflow import Divided, Pipeline, UsageError, execute_pipeline, make_schedule
from pipeflow.engine.parallel.context import current_context
from pipeflow.testing import run_processes, run_threads

PADDING = 0


class Wrapped(nn.Module):
    """Flattens, and ignores padding."""

    def __init__(self) -> None:
        super().__init__()
        self.loss = nn.CrossEntropyLoss(ignore_index=PADDING)

    def forward(self, output: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = self.loss(output.flatten(0, 1), labels.flatten())
        return loss


def over_labels(output: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(output.flatten(0, 1), labels.flatten(), ignore_index=PADDING)


def over_samples(output: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(output.flatten(0, 1), labels.flatten())


def added(output: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(output.flatten(0, 1), labels.flatten(), reduction="sum")


def of_pairs(output: Tensor, labels: Tensor) -> Tensor:
    """Takes an even number of samples alone."""
    return (output[0::2].reshape(len(output) // 2, -1) - output[1::2].reshape(len(output) // 2, -1)).square().mean()


def train(criterion: Callable[..., Tensor], message: str | None) -> None:
    """Two steps, whose losses are those of the whole batch, or an error; no random numbers are drawn."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(1, 5, (8, 6), generator=generator)
    labels[1, 1:] = labels[4, 3:] = PADDING
    layer = nn.Linear(3, 5)
    model = Pipeline(layer, make_schedule("1f1b", ranks=1, microbatches=2), criterion=criterion)
    batch = torch.randn(8, 6, 3, generator=generator), labels
    state = torch.get_rng_state()
    for _ in range(2):
        if message is None:
            loss = execute_pipeline(iter([batch]), model).loss
            assert loss is not None
            assert loss.item() == pytest.approx(criterion(layer(batch[0]), labels).item(), rel=1e-5)
        else:
            with pytest.raises(UsageError, match=message):
                execute_pipeline(iter([batch]), model)
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize(
    ("criterion", "message"),
    [
        (over_labels, None),
        (Wrapped(), None),
        (added, None),
        (over_samples, None),
        (of_pairs, "what the criterion's loss is divided by.* slice along the samples"),
    ],
)
def test_the_loss_of_a_criterion_is_that_of_the_batch(criterion: Callable[..., Tensor], message: str | None) -> None:
    run_threads(train, 1, criterion, message)


def collective(output: Tensor, labels: Tensor) -> Tensor:
    total = over_samples(output, labels)
    all_reduce(total.detach())
    return total


def refused_alone() -> None:
    model = Pipeline(nn.Linear(3, 5), make_schedule("1f1b", ranks=1, microbatches=2), criterion=collective)
    batch = torch.ones(4, 6, 3), torch.ones(4, 6, dtype=torch.long)
    with pytest.raises(UsageError, match=r"it calls a collective of torch\. Pass weigh="):
        execute_pipeline(iter([batch]), model)


@pytest.mark.slow
def test_a_criterion_that_communicates_is_not_traced() -> None:
    """A backend would be given tensors without memory."""
    run_processes(refused_alone, 1)


def changed_between_steps() -> None:
    """Class weights and the reduction of a loss may change; each step divides by what they are then."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 5, (8,), generator=generator)
    layer, criterion = nn.Linear(3, 5), nn.CrossEntropyLoss(weight=torch.ones(5))
    assert criterion.weight is not None
    model = Pipeline(layer, make_schedule("1f1b", ranks=1, microbatches=3), criterion=criterion)
    batch = torch.randn(8, 3, generator=generator), labels

    def require_whole() -> None:
        loss = execute_pipeline(iter([batch]), model).loss
        assert loss is not None
        assert loss.item() == pytest.approx(criterion(layer(batch[0]), labels).item(), rel=1e-5)

    require_whole()
    criterion.weight[labels[0]] = 7.0
    require_whole()
    criterion.weight = torch.arange(1.0, 6.0)
    require_whole()
    criterion.reduction = "sum"
    require_whole()


def test_a_criterion_may_change_between_steps() -> None:
    run_threads(changed_between_steps, 1)


class Shortening(nn.Module):
    """Returns a column for each microbatch that it has computed, of another number of entries."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.calls = nn.Parameter(torch.ones(3)), 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += 1
        return (inputs * self.weight)[:, : self.calls]


def train_lengths() -> None:
    """Microbatches of other lengths: known from the labels, or told when an output comes."""
    generator = torch.Generator().manual_seed(0)
    parts = [(torch.randn(2, length, 3, generator=generator), torch.ones(2, length).long()) for length in (4, 6)]
    layer, schedule = nn.Linear(3, 5), make_schedule("gpipe", ranks=1, microbatches=2)
    loss = execute_pipeline(iter([Divided(parts)]), Pipeline(layer, schedule, criterion=over_samples)).loss
    expected = over_samples(torch.cat([layer(inputs) for inputs, _ in parts], 1), torch.ones(2, 10).long())
    assert loss is not None
    assert loss.item() == pytest.approx(expected.item())
    model = Pipeline(Shortening(), schedule, criterion=lambda output, labels: output.mean())
    with pytest.raises(UsageError, match=r"microbatch 1 has outputs of shapes \[\(2, 2\)\], but \[\(2, 1\)\] .*weigh="):
        execute_pipeline(iter([(torch.randn(4, 3, generator=generator), torch.ones(4))]), model)


def test_outputs_of_other_lengths_are_weighed_by_labels_or_refused() -> None:
    run_threads(train_lengths, 1)


def masked(output: Tensor, labels: dict[str, Any]) -> Tensor:
    """A sum of means over the entries of one mask, of all entries, and where `more` is true, of another mask."""
    output = output.mean(-1)
    loss: Tensor = output.mean() + (output * labels["mask"]).sum() / labels["mask"].sum()
    return loss + (output * labels["other"]).sum() / labels["other"].sum() if labels["more"] else loss


def mean_or_masked(output: Tensor, labels: dict[str, Any]) -> Tensor:
    return masked(output, {**labels, "more": False}) if labels["more"] else output.mean()


def mean_or_sum(output: Tensor, labels: dict[str, Any]) -> Tensor:
    return output.sum() if labels["more"] else output.mean()


def run_replica(criterion: Any) -> None:
    mask, replica = torch.tensor([1.0, 0, 1, 1]), current_context().data_rank
    layer, schedule = nn.Linear(3, 5), make_schedule("gpipe", ranks=1, microbatches=2)
    nn.init.ones_(layer.weight)  # else a mean may be near 0, by chance
    model = Pipeline(layer, schedule, criterion=criterion)
    batch = torch.ones(4, 3), {"mask": mask, "other": 1 + mask, "more": False}
    for evaluates in (False, True):
        loss = execute_pipeline(iter([batch]), model, forward_only=evaluates).loss
        assert loss is not None
        assert loss.item() == pytest.approx(criterion(layer(batch[0]), batch[1]).item())
    other = batch[0], {**batch[1], "more": replica == 1}
    with pytest.raises(UsageError, match=r"in other ways on other replicas.*weigh="):
        execute_pipeline(iter([other]), model)


@pytest.mark.parametrize("criterion", [masked, mean_or_masked, mean_or_sum])
def test_replicas_whose_losses_differ_are_told(criterion: Any) -> None:
    """Otherwise they compare weights that count different things, or exchange rows of different lengths, with which
    gloo ends a process.
    """
    run_threads(run_replica, 2, criterion, data=2)


class WithNumber(nn.Module):
    """Returns a number for each microbatch beside its output."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 5)

    def forward(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        output = self.linear(pixels)
        return output, output.square().max()


def test_a_number_beside_the_output_is_refused_only_where_a_criterion_reads_it() -> None:
    def run() -> None:
        module, schedule = WithNumber(), make_schedule("gpipe", ranks=1, microbatches=2)
        batch = torch.ones(4, 3), torch.zeros(4, 5)
        model = Pipeline(module, schedule, criterion=lambda output, labels: (output[0] - labels).square().mean())
        loss = execute_pipeline(iter([batch]), model).loss
        assert loss is not None
        assert loss.item() == pytest.approx(module(batch[0])[0].square().mean().item())
        model = Pipeline(module, schedule, criterion=lambda output, _: output[0].mean() + output[1])
        with pytest.raises(UsageError, match=r"returns a number for each microbatch.*weigh="):
            execute_pipeline(iter([batch]), model)

    run_threads(run, 1)
