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
    """`function(*arguments, **keywords)`, computed again in the backward instead of kept: torch's non-reentrant
    checkpoint, with which the second forward draws the same numbers from the current RandomTracker as the first, on
    whichever thread the backward runs. Collectives of the forward run again too.
    """
    if torch.compiler.is_compiling():
        raise UsageError(
            "pipeflow.tensor.checkpoint is called in what is being compiled, and torch.compile cannot replay the "
            "numbers of a RandomTracker: compile smaller modules, or checkpoint whole blocks from outside"
        )
    tracker = current_tracker()
    if tracker is None:
        return torch_checkpoint.checkpoint(function, *arguments, use_reentrant=False, **keywords)
    state = tracker.get_state()

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), tracker.rewound(state)

    return torch_checkpoint.checkpoint(function, *arguments, use_reentrant=False, context_fn=contexts, **keywords)
