"""Isolation: a region for forwards on fake tensors. They change nothing of the step that they may happen in, and are
not changed by it. Must not contain: these forwards.
"""

from __future__ import annotations

import logging
import random
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from pipeflow.engine.torch_private.autograd import pop_saved_hooks, push_saved_hooks, top_saved_hooks
from pipeflow.engine.torch_private.modes import FAKE_LOGGER


@contextmanager
def isolated(*, grads: bool = True) -> Iterator[None]:
    """Isolates a forward on fake tensors from the step that it may happen in: its warnings, its casts, its random
    numbers, what autograd saves, and whether gradients are on, which `grads` says.
    """
    logger, backend = logging.getLogger(FAKE_LOGGER), torch.backends.mha
    numpy: Any = sys.modules.get("numpy")
    drawn = random.getstate(), numpy and numpy.random.get_state()  # models draw training masks from these
    with (
        warnings.catch_warnings(action="ignore"),  # models repeat them when they run
        _set(lambda: logger.disabled, lambda value: setattr(logger, "disabled", value), True),  # errors say the same
        # autocast converts a weight each time, so that every conversion is seen
        _set(torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled, False),
        # torch's encoders run the operators of their modules: the fused ones are not defined on fake tensors
        _set(backend.get_fastpath_enabled, backend.set_fastpath_enabled, False),
        _without_saved_tensors_hooks(),
        torch.inference_mode(mode=False),
        torch.set_grad_enabled(grads),
    ):
        try:
            yield
        finally:
            random.setstate(drawn[0])
            if numpy:
                numpy.random.set_state(drawn[1])


@contextmanager
def _set(get: Callable[[], Any], put: Callable[[Any], Any], value: object) -> Iterator[None]:
    """Gives a setting another value."""
    before = get()
    put(value)
    try:
        yield
    finally:
        put(before)


@contextmanager
def _without_saved_tensors_hooks() -> Iterator[None]:
    """Lets autograd save as without hooks. A step that recomputes or offloads has some, and they change which
    operators run, which plans compare. torch has no public function that does this.
    """
    hooks = []
    while (top := top_saved_hooks(True)) is not None:
        hooks.append(top)
        pop_saved_hooks()
    try:
        yield
    finally:
        for pack, unpack in reversed(hooks):
            push_saved_hooks(pack, unpack)


def host_random_state() -> object:
    """The state of the generators of Python and NumPy, from which models draw, too."""
    numpy: Any = sys.modules.get("numpy")
    if numpy is None:
        return random.getstate()
    _, key, position, *_ = numpy.random.get_state()
    return random.getstate(), key.tobytes(), position
