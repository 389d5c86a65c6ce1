"""Megatron-LM's `megatron.core.tensor_parallel.random`: seeds and states of dropout, and activation checkpointing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Generator, Tensor

from pipeflow.core.errors import UsageError
from pipeflow.engine.parallel.context import context_if_launched, keep, kept
from pipeflow.engine.tensor import random
from pipeflow.megatron.parallel_state import keep_seed

_OF_TENSOR_RANK = "model-parallel-rng"
_KEY = "Megatron-LM's tracker"


class CudaRNGStatesTracker:
    """States of random generators by name, for torch's default generator of this process's device, which need not be a
    GPU. Ranks that are threads share that generator, so use processes.
    """

    def __init__(self) -> None:
        self._seen: random.RandomTracker | None = None
        self.reset()

    def reset(self) -> None:
        """Removes the random states of all names."""
        self._generators: dict[str, Generator] = {}

    def is_initialized(self) -> bool:
        """Returns True if there is a state."""
        return bool(self._generators)

    def add(self, name: str, seed: int) -> None:
        """Adds the state `name`, seeded with `seed`. Raises UsageError if there is one of that name."""
        if name in self._generators:
            raise UsageError(f"there is a state {name!r} already: call reset() first, or choose another name")
        current = random.current_tracker() if name == _OF_TENSOR_RANK else None
        own = Generator(_device()) if current is None else current.own  # which dropout draws from
        self._generators[name] = own.manual_seed(seed)

    def get_states(self) -> dict[str, Tensor]:
        """Returns the states by name, as byte tensors."""
        return {name: generator.get_state() for name, generator in self._generators.items()}

    def set_states(self, states: dict[str, Tensor]) -> None:
        """Sets the states that `get_states` returned."""
        for name, state in states.items():
            self._generators.setdefault(name, Generator(_device())).set_state(state)

    @contextmanager
    def fork(self, name: str = _OF_TENSOR_RANK) -> Iterator[None]:
        """Inside the `with` block torch draws from the state `name`, and afterwards continues where it was before.
        Raises UsageError if there is no such state.
        """
        if name not in self._generators:
            raise UsageError(f"there is no state {name!r}: add it, or call model_parallel_cuda_manual_seed(seed) first")
        own, default = self._generators[name], _default_generator()
        before = default.get_state()
        default.set_state(own.get_state())
        try:
            yield
        finally:
            own.set_state(default.get_state())
            default.set_state(before)


def get_cuda_rng_tracker() -> CudaRNGStatesTracker:
    """Returns this rank's tracker. After `model_parallel_cuda_manual_seed` its state "model-parallel-rng" is that from
    which `pipeflow.tensor.Dropout` draws for split tensors.
    """
    tracker: CudaRNGStatesTracker | None = kept(_KEY)
    if tracker is None:
        keep(_KEY, tracker := CudaRNGStatesTracker())
    current = random.current_tracker()
    if current is not None and tracker._seen is not current:  # else the script may have changed the state since
        tracker._seen, tracker._generators[_OF_TENSOR_RANK] = current, current.own
    return tracker


def _device() -> torch.device:
    context = context_if_launched()
    return torch.device("cpu") if context is None else context.device


def _default_generator() -> Generator:
    device = _device()
    return torch.cuda.default_generators[device.index or 0] if device.type == "cuda" else torch.default_generator


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """Seeds dropout on any device (`pipeflow.tensor.manual_seed`): tensor ranks draw the same numbers outside split
    regions and different numbers inside. Also seeds the initial weights of models made afterwards, and torch's default
    generator of the GPU, but not that of the CPU, which loaders use for shuffling.
    """
    keep_seed(seed)
    random.manual_seed(seed)
    torch.cuda.manual_seed(seed)


def checkpoint(function: Callable[..., Any], distribute_saved_activations: bool, *args: Any) -> Any:
    """Calls `pipeflow.tensor.checkpoint`. Raises UsageError for `distribute_saved_activations`."""
    if distribute_saved_activations:
        raise UsageError("distribute_saved_activations=True is not supported: every rank keeps its own inputs")
    return random.checkpoint(function, *args)
