"""Random numbers of a Trainer: those for data are the same on all ranks of a replica, and those for layers differ
between stages.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import torch

from pipeflow.parallel.context import Context


class DataRandom:
    """Random states of Python, numpy and torch's CPU generator used only for reading data (samplers, data sets,
    collators). So ranks read the same batches although their dropout draws other numbers.

    Args:
        seed: the seed, the same on every rank.
    """

    def __init__(self, seed: int) -> None:
        outside = _states()
        random.seed(seed)
        numpy.random.seed(seed % 2**32)  # data sets may draw from it
        torch.default_generator.manual_seed(seed)
        self._inside = _states()
        _restore(outside)

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Inside the `with` block, random numbers come from these states."""
        outside = _states()
        _restore(self._inside)
        try:
            yield
        finally:
            self._inside = _states()
            _restore(outside)


class Reading:
    """A loader whose random numbers come from a DataRandom; otherwise it behaves like the loader."""

    def __init__(self, loader: Any, drawing: DataRandom) -> None:
        self._loader = loader
        self._drawing = drawing

    def __iter__(self) -> Iterator[Any]:
        batches, end = iter(self._loader), object()
        while True:
            with self._drawing():
                batch = next(batches, end)
            if batch is end:
                return
            yield batch

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


def seed_layers(seed: int, context: Context) -> None:
    """Seeds torch for this rank's layers: alike on tensor ranks, differently in each stage and each replica."""
    torch.manual_seed(seed + 1024 * (context.pipeline_rank + context.pipeline_size * context.data_rank))


def _states() -> tuple[Any, Any, Any]:
    return random.getstate(), numpy.random.get_state(), torch.get_rng_state()


def _restore(states: tuple[Any, Any, Any]) -> None:
    setters: tuple[Callable[[Any], None], ...] = (random.setstate, numpy.random.set_state, torch.set_rng_state)
    for setter, state in zip(setters, states, strict=True):
        setter(state)
