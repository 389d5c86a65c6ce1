"""Mixup (arXiv 1710.09412): images are trained on in weighted pairs; and the loss and the accuracy of such labels,
which take plain ones as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from typing import Any, TypedDict

import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from pipeflow.core.errors import UsageError
from pipeflow.training.data import DataParallelLoader


class MixedLabels(TypedDict):
    """The labels of mixed images: each is `lam` parts of one of `targets_a` and 1 - `lam` of one of `targets_b`."""

    targets_a: Tensor
    targets_b: Tensor
    lam: Tensor


class Mixup:
    """Mixes each image of a batch with another one of it, by one weight for the batch.

    Everything is drawn from torch's default generator, which a loader of `get_dataloader` seeds alike on all ranks of a
    replica: it is for that loader's `collate_fn`.

    Args:
        alpha: the weight is drawn from Beta(alpha, alpha): near 0 or 1 for a small alpha. 0 mixes nothing.
        collate: makes the batch of pairs (image, label) that is mixed.

    Raises UsageError for a negative alpha.
    """

    def __init__(self, alpha: float = 0.2, collate: Callable[[list[Any]], Any] = default_collate) -> None:
        if not alpha >= 0:
            raise UsageError(f"mixup's alpha is 0 or more, got {alpha}")
        self.alpha = alpha
        self.collate = collate

    def __call__(self, samples: Sequence[tuple[Any, Any]]) -> tuple[Tensor, MixedLabels]:
        """The batch of these pairs (image, label): images (batch, ...), and their labels (batch)."""
        images, labels = self.collate(list(samples))
        return self.mix(images, labels)

    def mix(self, images: Tensor, labels: Tensor) -> tuple[Tensor, MixedLabels]:
        """A batch, mixed."""
        lam = torch.ones(())
        if self.alpha:
            lam = torch.distributions.Beta(self.alpha, self.alpha).sample()
        others = torch.randperm(len(images))
        mixed = images.lerp(images[others], (1 - lam).to(images.dtype))
        return mixed, {"targets_a": labels, "targets_b": labels[others], "lam": lam}


class MixupLoss(nn.Module):
    """The loss of mixed labels, lam * loss(targets_a) + (1 - lam) * loss(targets_b); of plain ones, the loss itself.

    Args:
        loss_fn_cls: makes the loss, a module or function of outputs and labels, such as nn.CrossEntropyLoss.
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
    """How many samples of a batch score their label highest, an integer tensor without dimensions; of mixed labels,
    `targets_a` counts.
    """

    def forward(self, outputs: Tensor, targets: Tensor | MixedLabels) -> Tensor:
        labels = targets if isinstance(targets, Tensor) else targets["targets_a"]
        return (outputs.argmax(-1) == labels).sum()


def mixed(loader: DataParallelLoader, alpha: float) -> DataParallelLoader:
    """A loader as `loader`, whose batches are mixed. Raises UsageError as Mixup does."""
    other = copy(loader)
    other.collate_fn = Mixup(alpha, loader.collate_fn)
    return other
