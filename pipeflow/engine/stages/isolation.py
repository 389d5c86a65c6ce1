"""Isolation: a region for forwards on fake tensors. They change nothing of the step that they may happen in, and are
not changed by it. Must not contain: these forwards.
"""

from __future__ import annotations

import logging
import random
import sys
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from pipeflow.engine.torch_private.autograd import pop_saved_hooks, push_saved_hooks, top_saved_hooks
from pipeflow.engine.torch_private.modes import FAKE_LOGGER


@contextmanager
def isolated(*, grads: bool = True) -> Iterator[None]:
    """Isolates a forward on fake tensors from the step that it may happen in: its warnings, its casts, its random
    numbers, what autograd saves, and whether gradients are on, which `grads` says.
    """
    ours = _quiet(), _without_cached_casts(), _own_random_numbers(), _without_saved_tensors_hooks()
    with ExitStack() as stack:
        for each in (*ours, _plain_attention(), torch.inference_mode(mode=False), _gradients(grads)):
            stack.enter_context(each)
        yield


@contextmanager
def _gradients(grads: bool) -> Iterator[None]:
    with torch.set_grad_enabled(grads):
        yield


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


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppresses warnings of models, which they repeat when they run, and torch's logs of operators that fail on fake
    tensors, which raise errors as well.
    """
    logger = logging.getLogger(FAKE_LOGGER)
    before, logger.disabled = logger.disabled, True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.disabled = before


@contextmanager
def _own_random_numbers() -> Iterator[None]:
    """Restores the generators of Python and NumPy, because models draw training masks from them."""
    numpy: Any = sys.modules.get("numpy")
    before = random.getstate(), numpy and numpy.random.get_state()
    try:
        yield
    finally:
        random.setstate(before[0])
        if numpy:
            numpy.random.set_state(before[1])


@contextmanager
def _plain_attention() -> Iterator[None]:
    """Lets torch's encoders run the operators of their modules without gradients, too: the fused ones are not defined
    on fake tensors.
    """
    backend = torch.backends.mha
    before = backend.get_fastpath_enabled()
    backend.set_fastpath_enabled(False)
    try:
        yield
    finally:
        backend.set_fastpath_enabled(before)


@contextmanager
def _without_cached_casts() -> Iterator[None]:
    """Makes autocast convert a weight each time, so that every conversion is seen."""
    cached = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(cached)


def host_random_state() -> object:
    """The state of the generators of Python and NumPy, from which models draw, too."""
    numpy: Any = sys.modules.get("numpy")
    if numpy is None:
        return random.getstate()
    _, key, position, *_ = numpy.random.get_state()
    return random.getstate(), key.tobytes(), position
