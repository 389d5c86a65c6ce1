"""What a training job calls beside modules, watched: backwards, losses, clipping and steps of optimizers. Leaves torch
as it was.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad
from torch.optim.optimizer import register_optimizer_step_pre_hook

from pipeflow.checking.sketches import row_sketches
from pipeflow.engine.torch_private.tensors import called_by_functional


@contextmanager
def _replaced(owner: Any, name: str, around: Callable[[Any], Any]) -> Iterator[None]:
    """Puts `around(original)` in the place of a function, while the context lasts."""
    original, is_own = getattr(owner, name), name in vars(owner)
    replacement = wraps(original)(around(original))
    setattr(owner, name, replacement)
    try:
        yield
    finally:
        if vars(owner).get(name) is not replacement:
            pass  # somebody else has replaced it since
        elif is_own:
            setattr(owner, name, original)
        else:
            delattr(owner, name)


Watch = AbstractContextManager[None]


def _watched(
    owner: Any, name: str, before: Callable[..., None] | None = None, after: Callable[..., None] | None = None
) -> Watch:
    """Calls `before(*arguments)` before a function, and `after(result, *arguments)` after it, in the context."""

    def around(original: Any) -> Any:
        def watched(*arguments: Any, **named: Any) -> Any:
            if before is not None:
                before(*arguments, **named)
            result = original(*arguments, **named)
            if after is not None:
                after(result, *arguments, **named)
            return result

        return watched

    return _replaced(owner, name, around)


def backwards_seen(seen: Callable[[Tensor], None]) -> Watch:
    """Calls `seen(loss)` with each scalar at which a backward starts."""

    def before(tensors: Any, *_: Any, **__: Any) -> None:
        for each in [tensors] if isinstance(tensors, Tensor) else list(tensors):
            if isinstance(each, Tensor) and each.numel() == 1 and each.is_floating_point():
                seen(each)

    return _watched(torch.autograd, "backward", before)


@contextmanager
def engine_losses_seen(models: Sequence[Any], seen: Callable[[Tensor], None]) -> Iterator[None]:
    """Calls `seen(loss)` for losses at which no backward of torch starts: that of each step of these Pipelines, and
    those of torch's pipelining schedules, of which some divide the backward. The latter may come from a backward again.
    """
    steps, schedules = (
        sys.modules.get(name) for name in ("pipeflow.engine.runtime.step", "torch.distributed.pipelining.schedules")
    )
    runners = {id(model.runner) for model in models if hasattr(model, "runner")}

    def after_step(output: Any, runner: Any, _: Any, call: Any, *__: Any) -> None:
        if id(runner) in runners and call.training and output.loss is not None:
            seen(output.loss.detach())

    def after_loss(loss: Any, *_: Any, **__: Any) -> None:
        if isinstance(loss, Tensor) and loss.numel() == 1 and loss.requires_grad:
            seen(loss)

    with ExitStack() as stack:
        if runners and steps is not None:
            stack.enter_context(_watched(steps.Runner, "step", after=after_step))
        if hasattr(owner := getattr(schedules, "_PipelineSchedule", None), "_compute_loss"):
            stack.enter_context(_watched(owner, "_compute_loss", after=after_loss))
        yield


def labels_seen(seen: Callable[..., None]) -> Watch:
    """Calls `seen(rows, valid, numbers)` for each cross entropy: sketches of the labels, how many of them count, and
    the function's numbers by name.
    """

    def before(
        input: Tensor, target: Tensor, weight: Any, reduction: int, ignored: int, smoothing: float = 0.0
    ) -> None:
        if not target.is_floating_point() and not hasattr(target, "device_mesh"):
            numbers = {"label_smoothing": smoothing, "ignore_index": ignored, "labels": target.numel()}
            seen(row_sketches(target, (0,) * (target.dim() - 1)).sum(0), (target != ignored).sum(), numbers)

    # not torch.nn.functional itself, which may be a key of other libraries' tables
    return _watched(called_by_functional, "cross_entropy_loss", before)


def scaling_seen(seen: Callable[[Tensor, Tensor], None]) -> Watch:
    """Calls `seen(loss, scaled loss)` when a GradScaler of torch multiplies a loss."""

    def after(scaled: Any, _: Any, outputs: Any) -> None:
        if isinstance(outputs, Tensor) and outputs.numel() == 1:
            seen(outputs, scaled)

    return _watched(torch.amp.GradScaler, "scale", after=after)


@contextmanager
def clipping_seen(seen: Callable[[Iterable[Tensor], float, Tensor], None]) -> Iterator[None]:
    """Calls `seen(parameters, largest norm, norm)` before torch clips gradients."""
    cells = getattr(getattr(clip_grad, "_clip_grads_with_norm_", None), "__closure__", None)
    if not cells:
        yield
        return
    original = cells[0].cell_contents  # what the function wraps, so that it is seen under all its names

    def clip(parameters: Any, max_norm: float, total_norm: Tensor, *arguments: Any, **named: Any) -> Any:
        listed = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        norm = total_norm.full_tensor() if hasattr(total_norm, "full_tensor") else total_norm
        seen(listed, max_norm, norm)
        return original(listed, max_norm, total_norm, *arguments, **named)

    cells[0].cell_contents = clip
    try:
        yield
    finally:
        cells[0].cell_contents = original


TRIALS = ("_forward_metadata_inference", "_backward_metadata_inference")  # torch's pipelining learns shapes


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
        for name in TRIALS:
            if hasattr(owner, name):
                stack.enter_context(_replaced(owner, name, around))
        yield


@contextmanager
def steps_seen(optimizers: Sequence[Any], seen: Callable[[Any], None]) -> Iterator[None]:
    """Calls `seen(optimizer)` before an optimizer steps: one of these, or any of torch's if there are none."""
    with ExitStack() as stack:
        for each in optimizers:
            if isinstance(each, torch.optim.Optimizer):
                stack.callback(each.register_step_pre_hook(lambda optimizer, *_: seen(optimizer)).remove)
            else:
                stack.enter_context(_watched(each, "step", lambda *_, own=each, **__: seen(own)))
        if not optimizers:
            stack.callback(register_optimizer_step_pre_hook(lambda optimizer, *_: seen(optimizer)).remove)
        yield
