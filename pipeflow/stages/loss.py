"""The loss that a module computes itself, and which labels its mean is over."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from pipeflow.core.errors import UsageError

IGNORED = -100
"""The label that torch's losses ignore by default."""


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
    """The module's own loss as a criterion. Raises UsageError if there is none."""
    loss = loss_in(output)
    if loss is None:
        raise UsageError(
            f"the module returned a {type(output).__name__} without a loss: pass from_module(criterion=...), or "
            "include the labels in batches from which it computes one"
        )
    return loss


def weigh_by_labels(targets: Sequence[int], labels: object) -> partial[float] | None:
    """The function that weighs a microbatch if the module's own loss is a mean over labels; None if it is a mean over
    samples.

    It is found by comparing how many `targets` the losses counted with the number of `labels`, none of which may be
    IGNORED.
    """
    if not isinstance(labels, Tensor) or labels.dim() < 2 or labels.is_floating_point():
        return None
    for skipped in (0, 1):
        if labels[:, skipped:].numel() in targets:
            return partial(_count, skipped=skipped)
    return None


def _count(labels: object, *, skipped: int) -> float:
    """The number of labels that count, without the first `skipped` ones of each sequence, which a language model does
    not predict.
    """
    if not isinstance(labels, Tensor):
        return 1.0
    return float((labels[:, skipped:] != IGNORED).sum())


def all_counted(labels: object) -> object:
    """The labels with IGNORED ones replaced, for a trace."""
    if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.dtype is torch.bool or not labels.numel():
        return labels
    return torch.where(labels == IGNORED, labels.max().clamp(min=0), labels)
