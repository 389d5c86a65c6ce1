"""Activation checkpointing that replays the numbers of a RandomTracker."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.utils import checkpoint as torch_checkpoint

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
