"""A module's own loss is that of the whole batch, whatever it is a mean over."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from pipeflow import Pipeline, UsageError, execute_pipeline, make_schedule
from pipeflow.engine.parallel.context import current_context
from pipeflow.testing import run_threads
from pipeflow.testing.models import Layer
from tests.runtime.work import plain, require_near

CLASSES, LENGTH, WIDTH, SAMPLES = 6, 5, 6, 7
Loss = Callable[[Tensor, Tensor, nn.Module], Tensor]


class Whole(nn.Module):
    """Layers, and a loss of their output."""

    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(index, torch.float64) for index in range(4))
        self.register_buffer("classes", torch.tensor([1.0, 0.2, 3.0, 0.5, 2.0, 1.5], dtype=torch.float64))
        self.loss = loss

    def forward(self, inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        hidden = inputs
        for layer in self.layers:
            hidden = layer(hidden)
        return self.loss(hidden, labels, self), hidden


def entropy(**options: Any) -> Loss:
    def loss(hidden: Tensor, labels: Tensor, module: nn.Module) -> Tensor:
        weight = module.get_buffer("classes") if options.get("weighted") else None
        rest = {name: value for name, value in options.items() if name != "weighted"}
        return functional.cross_entropy(hidden.flatten(0, -2), labels.flatten(), weight=weight, **rest)

    return loss


def next_label(hidden: Tensor, labels: Tensor, module: nn.Module) -> Tensor:
    return functional.cross_entropy(hidden[:, :-1].transpose(1, 2), labels[:, 1:], ignore_index=0)


def first_label(hidden: Tensor, labels: Tensor, module: nn.Module) -> Tensor:
    return functional.cross_entropy(hidden[:, 0], labels[:, 0], reduction="sum") / len(labels)


def squares(hidden: Tensor, labels: Tensor, module: nn.Module) -> Tensor:
    return functional.mse_loss(hidden, labels[..., None].expand(hidden.shape).to(hidden.dtype))


def several_labels(hidden: Tensor, labels: Tensor, module: nn.Module) -> Tensor:
    wanted = functional.one_hot(labels, CLASSES).to(hidden.dtype)
    return functional.binary_cross_entropy_with_logits(hidden, wanted) + functional.smooth_l1_loss(hidden, wanted)


def sum_with_a_factor(hidden: Tensor, labels: Tensor, module: nn.Module) -> Tensor:
    """A mean over samples that is written as a sum."""
    return torch.add(hidden.square().mean(), hidden.cos().sum(), alpha=1 / hidden.shape[0])


def two_means(hidden: Tensor, labels: Tensor, module: nn.Module) -> Tensor:
    """Means over samples, one of which is written as a sum, and a number that depends on weights alone."""
    penalty = sum((parameter.square().sum() for parameter in module.parameters()), torch.zeros(()))
    sizes = torch.stack([hidden.square().mean(), hidden.sin().mean()]).sum()
    return sizes + 0.5 * hidden.cos().sum() / hidden.shape[0] + 1e-3 * penalty


def scaled_sum(hidden: Tensor, labels: Tensor, module: nn.Module) -> Tensor:
    return 0.25 * hidden.square().sum() + hidden.abs().sum()


def masked_mean(hidden: Tensor, labels: Tensor, module: nn.Module) -> Tensor:
    mask = labels != 0
    return (hidden.square().mean(dim=-1) * mask).sum() / mask.sum()


def picked_mean(hidden: Tensor, labels: Tensor, module: nn.Module) -> Tensor:
    return hidden[labels != 0].square().mean()


def read_mean(hidden: Tensor, labels: Tensor, module: nn.Module) -> Tensor:
    mask = labels != 0
    return (hidden.square().mean(dim=-1) * mask).sum() / max(int(mask.sum()), 1)


def root_mean(hidden: Tensor, labels: Tensor, module: nn.Module) -> Tensor:
    return hidden.square().mean().sqrt()


def means_over_samples(hidden: Tensor, labels: Tensor, module: nn.Module) -> Tensor:
    """A sum over what does not become longer with the batch."""
    return hidden.square().mean(dim=0).sum()


def means_of_two_things(hidden: Tensor, labels: Tensor, module: nn.Module) -> Tensor:
    return entropy(ignore_index=0)(hidden, labels, module) + hidden.square().mean()


def pooled(hidden: Tensor, labels: Tensor, module: nn.Module) -> Tensor:
    """Operators that change the shape or strides of a tensor in place."""
    first = functional.adaptive_avg_pool1d(hidden.transpose(1, 2), 1).squeeze_(-1).unsqueeze_(0).transpose_(0, 1)
    return functional.cross_entropy(first.flatten(0, 1), labels[:, 0])


READ: dict[str, Loss] = {
    "ignored": entropy(),
    "ignored -1": entropy(ignore_index=-1),
    "ignored 0": entropy(ignore_index=0),
    "next": next_label,
    "classes": entropy(weighted=True),
    "classes, ignored 0": entropy(weighted=True, ignore_index=0),
    "smoothed": entropy(label_smoothing=0.1, ignore_index=0),
    "smoothed classes": entropy(label_smoothing=0.1, weighted=True),
    "sum": entropy(reduction="sum"),
    "first": first_label,
    "squares": squares,
    "several": several_labels,
    "factor": sum_with_a_factor,
    "two": two_means,
    "scaled": scaled_sum,
    "masked": masked_mean,
    "picked": picked_mean,
    "read": read_mean,
    "over samples": means_over_samples,
    "two things": means_of_two_things,
    "pooled": pooled,
}


def batch_of(name: str, seed: int, samples: int = SAMPLES) -> tuple[Tensor, Tensor]:
    """Labels that count more in some samples than in others."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(samples, LENGTH, WIDTH, generator=generator, dtype=torch.float64)
    labels = torch.randint(1, CLASSES, (samples, LENGTH), generator=generator)
    ignored = {"ignored": -100, "ignored -1": -1}.get(name, 0)
    if name not in ("classes", "smoothed classes", "first", "several", "pooled"):
        lengths = torch.arange(samples)[:, None] % LENGTH
        labels = torch.where(torch.arange(LENGTH) >= lengths, labels, ignored)
    return inputs, labels


def step(name: str, loss: Loss, evaluates: bool, full: bool, weigh: Any) -> tuple[float, Any]:
    """A step after an example of microbatches of one sample, in which all labels count, or after another one."""
    context = current_context()
    schedule = make_schedule("1f1b", ranks=context.pipeline_size, microbatches=3)
    example = batch_of("first", 9, 3) if full else batch_of(name, 9)
    pipeline = Pipeline.from_module(Whole(loss), schedule, example, weigh=weigh)
    batch = batch_of(name, context.data_rank, SAMPLES - context.data_rank)
    output = execute_pipeline(iter([batch]), pipeline, broadcast_loss=True, forward_only=evaluates)
    assert output.loss is not None
    return output.loss.item(), {name: plain(each.grad) for name, each in pipeline.named_parameters()}


def whole_step(name: str, loss: Loss, replicas: int) -> tuple[float, dict[str, Tensor]]:
    module = Whole(loss)
    batches = [batch_of(name, replica, SAMPLES - replica) for replica in range(replicas)]
    inputs, labels = (torch.cat(parts) for parts in zip(*batches, strict=True))
    value, _ = module(inputs, labels)
    value.backward()
    return value.item(), {name: each.grad for name, each in module.named_parameters() if each.grad is not None}


FULL = pytest.mark.parametrize("full", [False, pytest.param(True, marks=pytest.mark.exhaustive)], ids=["", "full"])


@pytest.mark.some(3)
@FULL
@pytest.mark.parametrize("name", READ)
def test_what_it_is_divided_by_is_read(name: str, full: bool) -> None:
    for data in (1, 2):
        expected, gradients = whole_step(name, READ[name], data)
        for loss, found in run_threads(step, 2 * data, name, READ[name], False, full, None, data=data):
            assert loss == pytest.approx(expected, rel=1e-12)
            require_near(found, gradients, 1e-11)


@pytest.mark.parametrize("name", ["ignored 0", "sum", "two things", "pooled"])
def test_it_is_read_for_evaluations(name: str) -> None:
    expected, _ = whole_step(name, READ[name], 2)
    for loss, _ in run_threads(step, 4, name, READ[name], True, False, None, data=2):
        assert loss == pytest.approx(expected, rel=1e-12)


def refused() -> None:
    with pytest.raises(UsageError, match=r"sqrt of a sum over samples is no sum over samples. Pass weigh="):
        step("root", root_mean, False, False, None)


def test_what_cannot_be_read_is_an_error_on_every_rank() -> None:
    run_threads(refused, 2)


def of_two_samples(hidden: Tensor, labels: Tensor, module: nn.Module) -> Tensor:
    return hidden.view(2, LENGTH * WIDTH).square().mean()


def fixed_step(given: Tensor, labels: Tensor) -> float:
    schedule = make_schedule("1f1b", ranks=current_context().pipeline_size, microbatches=3)
    pipeline = Pipeline.from_module(Whole(of_two_samples), schedule, (given, labels))
    output = execute_pipeline(iter([(given, labels)]), pipeline, broadcast_loss=True)
    assert output.loss is not None
    return output.loss.item()


def test_a_forward_may_take_microbatches_of_one_size_alone() -> None:
    given, labels = batch_of("first", 0, 6)
    expected = torch.stack(
        [Whole(of_two_samples)(*pair)[0] for pair in zip(given.split(2), labels.split(2), strict=True)]
    )
    for loss in run_threads(fixed_step, 2, given, labels):
        assert loss == pytest.approx(expected.mean().item(), rel=1e-12)


def noisy(hidden: Tensor, labels: Tensor, module: nn.Module) -> Tensor:
    return (hidden + random.random()).square().mean()


def test_to_read_a_loss_draws_no_numbers() -> None:
    def rank() -> bool:
        before = random.getstate()
        Pipeline.from_module(Whole(noisy), make_schedule("1f1b", ranks=1, microbatches=3), batch_of("first", 0))
        return random.getstate() == before

    assert run_threads(rank, 1) == [True]


class InTree(nn.Module):
    """Takes labels within a tree, beside numbers of the same shape."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(2))
        generator = torch.Generator().manual_seed(0)  # ranks are threads, which share torch's own
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))

    def forward(self, labels: Any) -> Tensor:
        hidden = labels["inputs"]
        for layer in self.layers:
            hidden = layer(hidden)
        return functional.cross_entropy(hidden, labels["targets"])


def test_labels_may_be_in_a_tree() -> None:
    """A microbatch weighs by the labels that count in it, which nothing tells apart from other numbers."""
    targets = torch.tensor([1, -100, 2, 3, -100, -100])
    tree = {"numbers": torch.arange(6), "inputs": torch.randn(6, WIDTH, dtype=torch.float64), "targets": targets}
    expected = InTree()(tree).item()

    def rank() -> float:
        model = Pipeline.from_module(InTree(), make_schedule("1f1b", ranks=2, microbatches=3), {"labels": tree})
        output = execute_pipeline(iter([{"labels": tree}]), model, broadcast_loss=True)
        assert output.loss is not None
        return output.loss.item()

    assert run_threads(rank, 2) == pytest.approx([expected] * 2, rel=1e-12)
