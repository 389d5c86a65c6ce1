"""Stage: one piece of the model, the keywords it is called with, and where its weight gradients wait. What must not
live here: when it runs, and where its input comes from.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import Parameter, signature
from typing import Any, NamedTuple

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
        self.takes = Keywords.of(module, takes_input=index > 0)

    def load(self, batch: Batch) -> None:
        """Keeps, per microbatch, the entries that the module takes."""
        self.keywords = batch.split({name: entry for name, entry in batch.named.items() if name in self.takes})


class Keywords(NamedTuple):
    """The entries of a batch that a module takes by name: `names`, or where these are None all but `positional`."""

    names: frozenset[str] | None
    positional: str | None

    @classmethod
    def of(cls, module: nn.Module, *, takes_input: bool) -> Keywords:
        """Those of `module.forward`, or of what was compiled; its first parameter is none of them when it holds the
        previous stage's output.
        """
        parameters = list(signature(getattr(module, "_orig_mod", module).forward).parameters.values())
        first = parameters.pop(0).name if takes_input and parameters and parameters[0].kind in _BY_POSITION else None
        if any(parameter.kind is Parameter.VAR_KEYWORD for parameter in parameters):
            return cls(None, first)
        return cls(frozenset(parameter.name for parameter in parameters if parameter.kind in _BY_NAME), first)

    def __contains__(self, name: object) -> bool:
        return name != self.positional if self.names is None else name in self.names


_BY_NAME = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
_BY_POSITION = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
