"""Mixup (arXiv 1710.09412): training on weighted pairs of images, with a loss and an accuracy that accept mixed and
plain labels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from typing import Any, TypedDict

import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from pipeflow.core.errors import UsageError
from pipeflow.training.data.loader import DataParallelLoader


class MixedLabels(TypedDict):
    """Labels of mixed images: image i is `lam` parts of class `targets_a[i]`, 1 - `lam` of class `targets_b[i]`."""

    targets_a: Tensor
    targets_b: Tensor
    lam: Tensor


class Mixup:
    """Mixes each image of a batch with another image of the batch, with one weight for the whole batch.

    Use it as `collate_fn` of a `get_dataloader` loader: random numbers come from torch's default generator, which that
    loader seeds equally on all ranks of a replica.

    Args:
        alpha: the weight is drawn from Beta(alpha, alpha), near 0 or 1 for a small alpha. 0 disables mixing.
        collate: function that makes a batch from pairs (image, label), before mixing.

    Raises UsageError for a negative alpha.
    """

    def __init__(self, alpha: float = 0.2, collate: Callable[[list[Any]], Any] = default_collate) -> None:
        if not alpha >= 0:
            raise UsageError(f"Mixup's alpha must be at least 0, got {alpha}")
        self.alpha = alpha
        self.collate = collate

    def __call__(self, samples: Sequence[tuple[Any, Any]]) -> tuple[Tensor, MixedLabels]:
        """Makes a mixed batch from pairs (image, label): images [batch, ...] and MixedLabels of shape [batch]."""
        images, labels = self.collate(list(samples))
        return self.mix(images, labels)

    def mix(self, images: Tensor, labels: Tensor) -> tuple[Tensor, MixedLabels]:
        """Mixes a batch: images [batch, ...] and labels [batch]."""
        lam = torch.ones(())
        if self.alpha:
            lam = torch.distributions.Beta(self.alpha, self.alpha).sample()
        others = torch.randperm(len(images))
        mixed = images.lerp(images[others], (1 - lam).to(images.dtype))
        return mixed, {"targets_a": labels, "targets_b": labels[others], "lam": lam}


class MixupLoss(nn.Module):
    """Loss for mixed labels, lam * loss(targets_a) + (1 - lam) * loss(targets_b); for plain labels, the loss itself.

    Args:
        loss_fn_cls: class or function that makes the loss, such as nn.CrossEntropyLoss.
    """

    def __init__(self, loss_fn_cls: Callable[[], Callable[[Tensor, Tensor], Tensor]]) -> None:
        super().__init__()
        self.loss_fn = loss_fn_cls()

    def forward(self, outputs: Tensor, targets: Tensor | MixedLabels) -> Tensor:
        if not isinstance(targets, dict):
            return self.loss_fn(outputs, targets)
        lam = targets["lam"]
        return lam * self.loss_fn(outputs, targets["targets_a"]) + (1 - lam) * self.loss_fn(
            outputs, targets["targets_b"]
        )


class MixupAccuracy(nn.Module):
    """Number of samples in a batch whose label has the largest score, an integer scalar. For mixed labels `targets_a`
    is compared.
    """

    def forward(self, outputs: Tensor, targets: Tensor | MixedLabels) -> Tensor:
        labels = targets if isinstance(targets, Tensor) else targets["targets_a"]
        return (outputs.argmax(-1) == labels).sum()


def mixed(loader: DataParallelLoader, alpha: float) -> DataParallelLoader:
    """Returns a copy of `loader` whose batches are mixed by Mixup(alpha). Raises UsageError as Mixup does."""
    other = copy(loader)
    other.collate_fn = Mixup(alpha, loader.collate_fn)
    return other
