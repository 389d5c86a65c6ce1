"""Stage: one piece of the model, the entries that it is called with, and where its weight gradients wait. What must not
live here: when it runs, and where its input comes from.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from pipeflow.deferral.module import defer_weight_gradients
from pipeflow.runtime.keywords import Keywords
from pipeflow.runtime.microbatch import Batch


class Stage:
    """A module, prepared for split backwards, how it is called, and per microbatch of the step that runs, the keywords
    for it.
    """

    def __init__(self, index: int, module: nn.Module, call: Callable[..., Any] | None = None) -> None:
        self.index = index
        self.module = module
        self.call = module if call is None else call
        self.deferral = defer_weight_gradients(module)
        self.keywords: list[dict[str, object]] = []
        self.takes = Keywords.of(module, takes_input=index > 0)

    def load(self, batch: Batch) -> None:
        """Keeps, per microbatch, the entries that the module takes."""
        self.keywords = batch.split({name: entry for name, entry in batch.named.items() if name in self.takes})
