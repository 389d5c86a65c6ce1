"""Keywords: which entries of a batch a module takes by name. What must not live here: the entries themselves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from inspect import Parameter, signature
from typing import NamedTuple

from torch import nn

from pipeflow.runtime.names import uncompiled

Names = frozenset[str] | None
"""Names of entries; None for any."""


class Keywords(NamedTuple):
    """The entries of a batch that a module takes by name: `names`, or where these are None all but `positional`."""

    names: Names
    positional: str | None

    @classmethod
    def of(cls, module: nn.Module, *, takes_input: bool) -> Keywords:
        """Those of `module.forward`, or of what was compiled; its first parameter is none of them when it holds the
        previous stage's output.
        """
        parameters = list(signature(uncompiled(module).forward).parameters.values())
        first = parameters.pop(0).name if takes_input and parameters and parameters[0].kind in _BY_POSITION else None
        if any(parameter.kind is Parameter.VAR_KEYWORD for parameter in parameters):
            return cls(None, first)
        return cls(frozenset(parameter.name for parameter in parameters if parameter.kind in _BY_NAME), first)

    def __contains__(self, name: object) -> bool:
        return name != self.positional if self.names is None else name in self.names


_BY_NAME = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
_BY_POSITION = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)


def names_taken(stages: Mapping[int, nn.Module]) -> Names:
    """The names of the entries that `stages`, by their indices, take."""
    return union(Keywords.of(module, takes_input=stage > 0).names for stage, module in stages.items())


def union(names: Iterable[Names]) -> Names:
    """All of them together."""
    known = list(names)
    return None if None in known else frozenset().union(*(each for each in known if each is not None))
