"""States of torch's generators. torch holds a generator's mutex while it makes the Python object of a state. There
Python may collect garbage, and what that calls may let another thread go on. If that thread asks for a state too, it
waits for the mutex and keeps the interpreter's lock: the process stands still. So threads take turns.
"""

from __future__ import annotations

from collections.abc import Sequence
from threading import RLock

import torch
from torch import Generator, Tensor

_TURN = RLock()  # what a collection calls may ask for another generator's state


def state_of(generator: Generator) -> Tensor:
    """Returns a copy of the state of one generator."""
    with _TURN:
        return generator.get_state()


def default_states(gpus: Sequence[torch.device] = ()) -> list[Tensor]:
    """Returns the states of the default generators of the CPU and of some GPUs."""
    with _TURN:
        return [torch.get_rng_state(), *map(torch.cuda.get_rng_state, gpus)]


def set_default_states(states: Sequence[Tensor], gpus: Sequence[torch.device] = ()) -> None:
    """Sets these generators to states that `default_states` returned."""
    with _TURN:
        torch.set_rng_state(states[0])
        for gpu, state in zip(gpus, states[1:], strict=True):
            torch.cuda.set_rng_state(state, gpu)
