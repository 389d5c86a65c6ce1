"""Stage: one piece of the model, the keywords it is called with, and where its weight gradients wait. What must not
live here: when it runs, and where its input comes from.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import Parameter, signature
from typing import Any

from torch import nn

from pipeflow.deferral.module import defer_weight_gradients
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
        self._names = _keywords_of(module, takes_input=index > 0)

    def load(self, batch: Batch) -> None:
        """Keeps, per microbatch, the entries that the module names."""
        names = self._names
        self.keywords = batch.split(
            {name: entry for name, entry in batch.named.items() if names is None or name in names}
        )


def _keywords_of(module: nn.Module, *, takes_input: bool) -> frozenset[str] | None:
    """The names that `module.forward` takes, None for any; its first parameter is not one of them when it holds
    the previous stage's output.
    """
    parameters = list(signature(module.forward).parameters.values())
    if any(parameter.kind is Parameter.VAR_KEYWORD for parameter in parameters):
        return None
    by_name = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
    return frozenset(parameter.name for parameter in parameters[int(takes_input) :] if parameter.kind in by_name)
