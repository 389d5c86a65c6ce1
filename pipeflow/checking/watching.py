"""Watching what a training loop calls: backwards, losses over tokens, clipping, and steps of optimizers. Each function
is a context manager that calls back, and leaves torch as it was.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad
from torch.optim.optimizer import register_optimizer_step_pre_hook

from pipeflow.checking.sketch import row_sketches


@contextmanager
def _replaced(owner: Any, name: str, around: Callable[[Any], Any]) -> Iterator[None]:
    """Puts `around(original)` in the place of a function, while the context lasts."""
    original = getattr(owner, name)
    replacement = wraps(original)(around(original))
    setattr(owner, name, replacement)
    try:
        yield
    finally:
        if getattr(owner, name) is replacement:
            setattr(owner, name, original)


@contextmanager
def backwards_seen(seen: Callable[[Tensor], None]) -> Iterator[None]:
    """Calls `seen(loss)` with each scalar at which a backward starts."""

    def around(original: Any) -> Any:
        def backward(tensors: Any, *arguments: Any, **named: Any) -> Any:
            for each in [tensors] if isinstance(tensors, Tensor) else list(tensors):
                if isinstance(each, Tensor) and each.numel() == 1 and each.is_floating_point():
                    seen(each)
            return original(tensors, *arguments, **named)

        return backward

    with _replaced(torch.autograd, "backward", around):
        yield


@contextmanager
def engine_losses_seen(models: Sequence[Any], seen: Callable[[Tensor], None]) -> Iterator[None]:
    """Calls `seen(loss)` for losses at which no backward of torch starts: that of each step of these Pipelines, and
    those of torch's pipelining schedules, of which some divide the backward. The latter may come from a backward again.
    """
    steps, schedules = (
        sys.modules.get(name) for name in ("pipeflow.runtime.step", "torch.distributed.pipelining.schedules")
    )
    runners = {id(model.runner) for model in models if hasattr(model, "runner")}

    def around_step(original: Any) -> Any:
        def step(runner: Any, data_iter: Any, call: Any, *arguments: Any) -> Any:
            output = original(runner, data_iter, call, *arguments)
            if id(runner) in runners and call.training and output.loss is not None:
                seen(output.loss.detach())
            return output

        return step

    def around_loss(original: Any) -> Any:
        def compute(*arguments: Any, **named: Any) -> Any:
            loss = original(*arguments, **named)
            if isinstance(loss, Tensor) and loss.numel() == 1 and loss.requires_grad:
                seen(loss)
            return loss

        return compute

    with ExitStack() as stack:
        if runners and steps is not None:
            stack.enter_context(_replaced(steps.Runner, "step", around_step))
        if hasattr(owner := getattr(schedules, "_PipelineSchedule", None), "_compute_loss"):
            stack.enter_context(_replaced(owner, "_compute_loss", around_loss))
        yield


@contextmanager
def labels_seen(seen: Callable[[Tensor, Tensor], None]) -> Iterator[None]:
    """Calls `seen(rows, valid)` for each cross entropy: sketches of the labels, and how many of them count."""

    def around(original: Any) -> Any:
        def cross_entropy(input: Tensor, target: Tensor, weight: Any, reduction: int, ignored: int, *rest: Any) -> Any:
            if not target.is_floating_point() and not hasattr(target, "device_mesh"):
                seen(row_sketches(target, (0,) * (target.dim() - 1)).sum(0), (target != ignored).sum())
            return original(input, target, weight, reduction, ignored, *rest)

        return cross_entropy

    inner = torch._C._nn  # what torch.nn.functional calls: that itself may be a key of other libraries' tables
    with _replaced(inner, "cross_entropy_loss", around):
        yield


@contextmanager
def scaling_seen(seen: Callable[[Tensor, Tensor], None]) -> Iterator[None]:
    """Calls `seen(loss, scaled loss)` when a GradScaler of torch multiplies a loss."""

    def around(original: Any) -> Any:
        def scale(scaler: Any, outputs: Any) -> Any:
            scaled = original(scaler, outputs)
            if isinstance(outputs, Tensor) and outputs.numel() == 1:
                seen(outputs, scaled)
            return scaled

        return scale

    with _replaced(torch.amp.GradScaler, "scale", around):
        yield


@contextmanager
def clipping_seen(seen: Callable[[Iterable[Tensor], float, Tensor], None]) -> Iterator[None]:
    """Calls `seen(parameters, largest norm, norm)` before torch clips gradients."""
    name = "_clip_grads_with_norm_"
    if not hasattr(clip_grad, name):
        yield
        return

    def around(original: Any) -> Any:
        def clip(parameters: Any, max_norm: float, total_norm: Tensor, *arguments: Any, **named: Any) -> Any:
            listed = [parameters] if isinstance(parameters, Tensor) else list(parameters)
            norm = total_norm.full_tensor() if hasattr(total_norm, "full_tensor") else total_norm
            seen(listed, max_norm, norm)
            return original(listed, max_norm, total_norm, *arguments, **named)

        return clip

    with _replaced(clip_grad, name, around):
        yield


@contextmanager
def trials_seen(seen: Callable[[bool], None]) -> Iterator[None]:
    """Calls `seen(True)` when torch's pipelining begins to run a stage on no data, to learn the shapes that it sends,
    and `seen(False)` after it.
    """
    stages = sys.modules.get("torch.distributed.pipelining.stage")
    owner = getattr(stages, "PipelineStage", None)

    def around(original: Any) -> Any:
        def trial(*arguments: Any, **named: Any) -> Any:
            seen(True)
            try:
                return original(*arguments, **named)
            finally:
                seen(False)

        return trial

    with ExitStack() as stack:
        for name in ("_forward_metadata_inference", "_backward_metadata_inference"):
            if hasattr(owner, name):
                stack.enter_context(_replaced(owner, name, around))
        yield


@contextmanager
def steps_seen(optimizers: Sequence[Any], seen: Callable[[Any], None]) -> Iterator[None]:
    """Calls `seen(optimizer)` before an optimizer steps: one of these, or any of torch's if there are none."""

    def before(optimizer: Any, *_: object) -> None:
        seen(optimizer)

    removers: list[Callable[[], None]] = []
    for each in optimizers:
        if isinstance(each, torch.optim.Optimizer):
            removers.append(each.register_step_pre_hook(before).remove)
        else:
            removers.append(_step_wrapped(each, before))
    if not optimizers:
        removers.append(register_optimizer_step_pre_hook(before).remove)
    try:
        yield
    finally:
        for remove in removers:
            remove()


def _step_wrapped(optimizer: Any, before: Callable[[Any], None]) -> Callable[[], None]:
    """Lets an object's `step` call `before` first; returns what undoes it."""
    own = optimizer.step

    @wraps(own)
    def step(*arguments: Any, **named: Any) -> Any:
        before(optimizer)
        return own(*arguments, **named)

    optimizer.step = step
    return lambda: delattr(optimizer, "step")
