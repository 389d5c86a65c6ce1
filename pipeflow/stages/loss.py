"""The loss that a module computes itself, and what its mean is over: which of the labels count."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from pipeflow.core.errors import UsageError

IGNORED = -100
"""The label that losses of torch leave out."""


def loss_in(output: object) -> Tensor | None:
    """The loss in a module's output: a scalar, `output.loss`, `output["loss"]`, or the first of a tuple."""
    found: object = output
    if isinstance(output, Mapping):
        found = output.get("loss")
    elif isinstance(output, tuple | list):
        found = getattr(output, "loss", output[0] if output else None)
    elif not isinstance(output, Tensor):
        found = getattr(output, "loss", None)
    return found if isinstance(found, Tensor) and not found.dim() else None


def own_loss(output: object, labels: object) -> Tensor:
    """As a criterion. Raises UsageError where there is none."""
    loss = loss_in(output)
    if loss is None:
        raise UsageError(
            f"the module returned a {type(output).__name__} without a loss: pass from_module(criterion=...), or give "
            "batches the labels from which it computes one"
        )
    return loss


def weigh_by_labels(targets: Sequence[int], labels: object) -> partial[float] | None:
    """What the mean in a module's own loss is over, if it is over labels: found by comparing how many `targets` its
    losses counted with how many `labels` there were, of which none was IGNORED. None for the samples.
    """
    if not isinstance(labels, Tensor) or labels.dim() < 2 or labels.is_floating_point():
        return None
    for skipped in (0, 1):
        if labels[:, skipped:].numel() in targets:
            return partial(_count, skipped=skipped)
    return None


def _count(labels: object, *, skipped: int) -> float:
    """How many labels count, without the first `skipped` ones of each sequence, which a language model predicts not."""
    if not isinstance(labels, Tensor):
        return 1.0
    return float((labels[:, skipped:] != IGNORED).sum())


def all_counted(labels: object) -> object:
    """Labels of which none is IGNORED, for a trace."""
    if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.dtype is torch.bool or not labels.numel():
        return labels
    return torch.where(labels == IGNORED, labels.max().clamp(min=0), labels)
