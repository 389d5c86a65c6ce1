"""Mixup: how a batch is mixed, and the loss and the accuracy of its labels."""

from __future__ import annotations

from threading import Lock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import pipeflow
from pipeflow.testing import run_threads
from pipeflow.training import get_dataloader
from vit.mixup import MixedLabels, Mixup, MixupAccuracy, MixupLoss

SCORES = torch.tensor([[3.0, 1.0, 0.0], [0.0, 1.0, 5.0], [2.0, 2.5, 0.0]])
MIXED: MixedLabels = {
    "targets_a": torch.tensor([0, 1, 1]),
    "targets_b": torch.tensor([1, 2, 0]),
    "lam": torch.tensor(0.3),
}


def test_the_loss_weighs_both_labels() -> None:
    loss = MixupLoss(loss_fn_cls=nn.CrossEntropyLoss)
    one, other = (functional.cross_entropy(SCORES, MIXED[name]) for name in ("targets_a", "targets_b"))
    torch.testing.assert_close(loss(SCORES, MIXED), 0.3 * one + 0.7 * other)
    assert loss(SCORES, MIXED["targets_a"]).equal(one)


def test_the_accuracy_counts_the_first_label() -> None:
    assert int(MixupAccuracy()(SCORES, MIXED)) == 2
    assert int(MixupAccuracy()(SCORES, MIXED["targets_b"])) == 1


@pytest.mark.parametrize("alpha", [0.0, 0.2, 1.0])
def test_a_batch_is_mixed_as_its_labels_say(alpha: float) -> None:
    torch.manual_seed(0)
    samples = [(functional.one_hot(torch.tensor(label), 5).double(), label) for label in range(5)]
    images, labels = Mixup(alpha)(samples)
    lam = labels["lam"].double()
    one, other = (functional.one_hot(labels[name], 5).double() for name in ("targets_a", "targets_b"))
    torch.testing.assert_close(images, lam * one + (1 - lam) * other)
    assert labels["targets_a"].tolist() == list(range(5)) == sorted(labels["targets_b"].tolist())
    assert (lam == 1) == (alpha == 0)


def test_a_negative_alpha_is_refused() -> None:
    with pytest.raises(pipeflow.UsageError, match="must be at least 0"):
        Mixup(-1.0)


def test_all_ranks_of_a_pipeline_mix_alike_and_the_loss_is_that_of_the_whole_batch() -> None:
    """Over three microbatches of unequal size."""
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(7, 6), torch.arange(7) % 4)
    layers, lock = (nn.Linear(6, 5), nn.Linear(5, 4)), Lock()

    def train() -> tuple[Tensor, Tensor, MixedLabels]:
        context = pipeflow.current_context()
        with lock:  # torch's default generator is one for all threads
            torch.randn(context.rank)  # and is in another state on every stage
            [(images, labels)] = get_dataloader(data, 7, shuffle=True, collate_fn=Mixup(1.0))
        schedule = pipeflow.make_schedule("1f1b", ranks=2, microbatches=3)
        pipeline = pipeflow.Pipeline(layers[context.rank], schedule, criterion=MixupLoss(nn.CrossEntropyLoss))
        output = pipeflow.execute_pipeline(iter([(images, labels)]), pipeline, broadcast_loss=True)
        assert isinstance(output.loss, Tensor)
        return output.loss, images, labels

    (loss, images, labels), (_, others, _) = run_threads(train, 2)
    assert images.equal(others)
    expected = MixupLoss(nn.CrossEntropyLoss)(layers[1](layers[0](images)), labels)
    torch.testing.assert_close(torch.as_tensor(loss), expected.detach())
