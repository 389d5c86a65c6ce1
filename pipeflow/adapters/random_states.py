"""Random numbers apart from those of the script: of this rank's layers, and of the data that ranks read alike."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy
import torch
from torch import Tensor

from pipeflow.engine.parallel.context import Context
from pipeflow.engine.torch_private.tensors import default_states, set_default_states


class OwnRandom:
    """States of random generators for one use. The generators' other numbers stay untouched.

    Args:
        seed: seed of these states.
        gpus: GPUs whose generators draw beside torch's on the CPU.
        is_of_data: whether those of Python and numpy draw, too.
    """

    def __init__(self, seed: int, gpus: Sequence[torch.device] = (), *, is_of_data: bool = False) -> None:
        self._gpus, self._is_of_data = gpus, is_of_data
        outside = self._states()
        torch.default_generator.manual_seed(seed)
        if gpus:
            torch.cuda.manual_seed(seed)
        if is_of_data:
            random.seed(seed)
            numpy.random.seed(seed % 2**32)
        self._inside = self._states()
        self._restore(*outside)

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Inside the `with` block, random numbers come from these states."""
        outside = self._states()
        self._restore(*self._inside)
        try:
            yield
        finally:
            self._inside = self._states()
            self._restore(*outside)

    def _states(self) -> tuple[Any, ...]:
        others = (random.getstate(), numpy.random.get_state()) if self._is_of_data else ()
        return default_states(self._gpus), *others

    def _restore(self, of_torch: list[Tensor], *others: Any) -> None:
        set_default_states(of_torch, self._gpus)
        for restore, state in zip((random.setstate, numpy.random.set_state), others, strict=False):
            restore(state)


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
    return OwnRandom(seed, is_of_data=True)


def random_of_layers(context: Context) -> OwnRandom:
    """States of torch's generators for the layers of this rank. They begin with the seed of the script, whose own
    random numbers stay the same on all ranks, so that all ranks of a pipeline read the same batches.
    """
    gpus = [context.device] if context.device.type == "cuda" else []
    return OwnRandom(seed_of_layers(torch.initial_seed(), context), gpus)


def seed_of_layers(seed: int, context: Context) -> int:
    """The seed of this rank's layers: alike on tensor ranks, others in each pipeline rank, context rank and replica."""
    return (seed + 1024 * (context.pipeline_rank + context.pipeline_size * context.copies.rank)) % 2**63
