"""Activation checkpointing that replays the numbers of a RandomTracker."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.utils import checkpoint as torch_checkpoint

from pipeflow.core.errors import UsageError
from pipeflow.tensor.random import current_tracker


@torch._disable_dynamo  # as torch's own checkpoint is; torch.compiler.disable would import the compiler right here
def checkpoint(function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
    """Returns `function(*arguments, **keywords)`, and recomputes it in the backward instead of keeping its activations.

    This is torch's non-reentrant checkpoint; in addition, the second forward draws the same numbers from the current
    RandomTracker as the first, on any thread. Collectives of the forward run again, too.

    torch.compile cannot replay those numbers, so it does not compile `function` here: compiled code ends before the
    call and continues after it. With `fullgraph=True`, torch.compile raises an error that names this function.
    """
    tracker = current_tracker()
    if tracker is None:
        return torch_checkpoint.checkpoint(function, *arguments, use_reentrant=False, **keywords)
    state = tracker.get_state()

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), tracker.rewound(state)

    return torch_checkpoint.checkpoint(function, *arguments, use_reentrant=False, context_fn=contexts, **keywords)


def replay_of(what: str, device: torch.device) -> Callable[[], AbstractContextManager[None]]:
    """Remembers the state of the random generators before a forward of `what`, and returns a function that makes a
    region in which the same numbers are drawn. The region raises UsageError at its end if the generators of Python or
    NumPy were used in it.
    """
    devices = [device] if device.type == "cuda" else []
    state, states = torch.get_rng_state(), [torch.cuda.get_rng_state(each) for each in devices]
    tracker = current_tracker()
    tracked = None if tracker is None else tracker.get_state()

    @contextmanager
    def region() -> Iterator[None]:
        before = _drawn()
        rewound = nullcontext() if tracker is None or tracked is None else tracker.rewound(tracked)
        with torch.random.fork_rng(devices), rewound:
            torch.set_rng_state(state)
            for each, its in zip(devices, states, strict=True):
                torch.cuda.set_rng_state(its, each)
            yield
        if _drawn() != before:
            raise UsageError(
                f"{what} draws from the random numbers of Python or NumPy, so its recomputation differs from "
                "its forward: draw from torch, or do not recompute the stage"
            )

    return region


def _drawn() -> tuple[object, ...]:
    """The state of the random generators of Python and NumPy."""
    numpy: Any = sys.modules.get("numpy")
    if numpy is None:
        return (random.getstate(),)
    _, keys, position, *_ = numpy.random.get_state()
    return random.getstate(), keys.tobytes(), position
