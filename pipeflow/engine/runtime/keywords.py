"""Keywords: which entries of a batch a module takes by name. Must not contain: the entries themselves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from inspect import Parameter, signature

from torch import nn

from pipeflow.core.route import Routes, sources_of
from pipeflow.engine.runtime.original import uncompiled

Names = frozenset[str] | None
"""Names of entries; None stands for all names."""


@dataclass(frozen=True, slots=True)
class Keywords:
    """The entries of a batch that a module takes by name.

    Attributes:
        names: names of the entries; None if it takes any except `positional`.
        positional: names of parameters that are filled by position.
    """

    names: Names
    positional: frozenset[str]

    @classmethod
    def of(cls, module: nn.Module, *, inputs: int) -> Keywords:
        """The keywords of `module.forward` (of the original module if it is compiled), without the first `inputs`
        parameters, which receive outputs of earlier stages.
        """
        parameters = list(signature(uncompiled(module).forward).parameters.values())
        first = [parameter for parameter in parameters[:inputs] if parameter.kind in _BY_POSITION]
        positional, rest = frozenset(parameter.name for parameter in first), parameters[len(first) :]
        if any(parameter.kind is Parameter.VAR_KEYWORD for parameter in rest):
            return cls(None, positional)
        return cls(frozenset(parameter.name for parameter in rest if parameter.kind in _BY_NAME), positional)

    def __contains__(self, name: object) -> bool:
        return name not in self.positional if self.names is None else name in self.names


_BY_NAME = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
_BY_POSITION = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)


def names_taken(stages: Mapping[int, nn.Module], routes: Routes) -> Names:
    """The names of the entries that any of `stages` takes; `stages` are modules by stage index."""
    return union(Keywords.of(module, inputs=len(sources_of(stage, routes))).names for stage, module in stages.items())


def union(names: Iterable[Names]) -> Names:
    """The union of several sets of names; None if one of them is None."""
    known = list(names)
    return None if None in known else frozenset().union(*(each for each in known if each is not None))
