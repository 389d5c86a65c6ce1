"""Gradient clipping over a whole pipeline."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pipeflow.core.errors import UsageError
from pipeflow.parallel.agreement import all_gather
from pipeflow.runtime.pipeline import Pipeline


def clip_grad_norm_(model: Pipeline, max_norm: float) -> Tensor:
    """Scales the gradients of all ranks so that their global 2-norm is at most `max_norm`, and returns the norm
    before (a float64 scalar, the same on every rank). A tied weight counts once. All ranks call it together.

    Raises UsageError for a `max_norm` that is not positive, PipelineError as `execute_pipeline` does.
    """
    if not max_norm > 0:
        raise UsageError(f"max_norm must be positive, got {max_norm}")
    counted_elsewhere = model.ties.counted_elsewhere
    gradients = {id(p): p.grad for p in model.parameters() if p.grad is not None}
    squares = [
        gradient.detach().double().pow(2).sum() for key, gradient in gradients.items() if key not in counted_elsewhere
    ]
    with model.alarm.raised_everywhere():
        rows = all_gather(model.context.transport, [float(sum(squares))])
    norm = math.sqrt(sum(square for [square] in rows))
    scale = max_norm / (norm + 1e-6)  # torch.nn.utils.clip_grad_norm_ adds it too: a pipeline changes no digit
    if scale < 1:
        for gradient in gradients.values():
            gradient.mul_(scale)
    return torch.tensor(norm, dtype=torch.float64)
