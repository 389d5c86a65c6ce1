"""Activation checkpointing that replays the numbers of a RandomTracker."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.utils import checkpoint as torch_checkpoint

from pipeflow.core.errors import UsageError
from pipeflow.tensor.random import current_tracker


def checkpoint(function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
    """Returns `function(*arguments, **keywords)`, and recomputes it in the backward instead of keeping its activations.

    This is torch's non-reentrant checkpoint; in addition, the second forward draws the same numbers from the current
    RandomTracker as the first, on any thread. Collectives of the forward run again, too. Raises UsageError in code that
    torch.compile compiles.
    """
    if torch.compiler.is_compiling():
        raise UsageError(
            "pipeflow.tensor.checkpoint was called in code that is being compiled, but torch.compile cannot replay "
            "the numbers of a RandomTracker: compile smaller modules, or checkpoint whole compiled blocks"
        )
    tracker = current_tracker()
    if tracker is None:
        return torch_checkpoint.checkpoint(function, *arguments, use_reentrant=False, **keywords)
    state = tracker.get_state()

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), tracker.rewound(state)

    return torch_checkpoint.checkpoint(function, *arguments, use_reentrant=False, context_fn=contexts, **keywords)
