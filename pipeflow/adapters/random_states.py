"""Random numbers apart from those of the script: of this rank's layers, and of the data that ranks read alike."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy
import torch

from pipeflow.engine.parallel.context import Context


class _Generator(NamedTuple):
    """How a random generator of this process is read, set and seeded."""

    state: Callable[[], Any]
    restore: Callable[[Any], object]
    seed: Callable[[int], object]


_PYTHON = _Generator(random.getstate, random.setstate, random.seed)
_NUMPY = _Generator(numpy.random.get_state, numpy.random.set_state, lambda seed: numpy.random.seed(seed % 2**32))
_TORCH = _Generator(torch.get_rng_state, torch.set_rng_state, torch.default_generator.manual_seed)
_CUDA = _Generator(torch.cuda.get_rng_state, torch.cuda.set_rng_state, torch.cuda.manual_seed)


class OwnRandom:
    """States of random generators for one use. The generators' other numbers stay untouched.

    Args:
        seed: seed of these states.
        generators: the generators.
    """

    def __init__(self, seed: int, *generators: _Generator) -> None:
        self._generators = generators
        outside = self._states()
        for each in generators:
            each.seed(seed)
        self._inside = self._states()
        self._restore(outside)

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Inside the `with` block, random numbers come from these states."""
        outside = self._states()
        self._restore(self._inside)
        try:
            yield
        finally:
            self._inside = self._states()
            self._restore(outside)

    def _states(self) -> list[Any]:
        return [each.state() for each in self._generators]

    def _restore(self, states: list[Any]) -> None:
        for generator, state in zip(self._generators, states, strict=True):
            generator.restore(state)


class RandomLoader:
    """A loader whose random numbers come from other states; otherwise it behaves like the loader."""

    def __init__(self, loader: Any, drawing: OwnRandom) -> None:
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


def random_of_data(seed: int) -> OwnRandom:
    """States of Python, numpy and torch's CPU generator used only for reading data (samplers, data sets, collators). So
    ranks with the same seed read the same batches although their dropout draws other numbers.
    """
    return OwnRandom(seed, _PYTHON, _NUMPY, _TORCH)


def random_of_layers(context: Context) -> OwnRandom:
    """States of torch's generators for the layers of this rank. They begin with the seed of the script, whose own
    random numbers stay the same on all ranks, so that all ranks of a pipeline read the same batches.
    """
    on_gpu = [_CUDA] if context.device.type == "cuda" else []
    return OwnRandom(seed_of_layers(torch.initial_seed(), context), _TORCH, *on_gpu)


def seed_of_layers(seed: int, context: Context) -> int:
    """The seed of this rank's layers: alike on tensor ranks, and others in each pipeline rank and each replica."""
    return (seed + 1024 * (context.pipeline_rank + context.pipeline_size * context.data_rank)) % 2**63
