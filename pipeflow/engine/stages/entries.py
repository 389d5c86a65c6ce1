"""Entries: a batch as a dict by the names of a forward's parameters, which is the form that every stage takes, and the
arguments made from it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping
from inspect import Parameter, signature
from typing import Any

from torch import nn

from pipeflow.core.errors import UsageError
from pipeflow.engine.stages.trace import Batch

LABELS = "labels"
_NAMED = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)


class Stateful(ABC):
    """An entry that a stage keeps and updates from one forward to the next, such as a cache of keys and values, or an
    entry that grows with it. The forward is planned with a different value than it runs with, so that one plan serves
    all forwards. To be split over microbatches, it must be a node of torch's pytrees.
    """

    @property
    @abstractmethod
    def key(self) -> Hashable:
        """The properties on which plans depend."""

    @abstractmethod
    def planned(self) -> object:
        """A new value for planning, made at each call."""

    @abstractmethod
    def own(self, stage: int) -> object:
        """The value with which stage `stage` runs."""


class Entries:
    """The parameters of `module.forward`. With a criterion, which takes the labels of a pair `(inputs, labels)`, a
    forward with `**kwargs` does not take them.
    """

    def __init__(self, module: nn.Module, *, has_criterion: bool = False) -> None:
        parameters = list(signature(module.forward).parameters.values())
        self._module = type(module).__name__
        self._positional = [each.name for each in parameters if each.kind in _NAMED[:2]]
        self._by_position_only = [each.name for each in parameters if each.kind is Parameter.POSITIONAL_ONLY]
        self._names = {each.name for each in parameters if each.kind in _NAMED}
        self._takes_more = any(each.kind is Parameter.VAR_POSITIONAL for each in parameters)
        self._has_criterion = has_criterion
        self._takes_any = any(each.kind is Parameter.VAR_KEYWORD for each in parameters)

    def of(self, batch: object) -> tuple[dict[str, Any], object]:
        """The entries of a batch, and its labels.

        A batch is a mapping of the forward's keywords including `labels`, or `(inputs, labels)`, where inputs are such
        a mapping, the first argument, or a tuple of all arguments. Raises UsageError for another batch, and for entries
        that the forward does not take.
        """
        if isinstance(batch, Mapping):
            entries = dict(batch)
            labels = entries.get(LABELS)
        elif isinstance(batch, tuple | list) and len(batch) == 2:
            inputs, labels = batch
            entries = dict(inputs) if isinstance(inputs, Mapping) else self._bound(inputs)
            takes = LABELS in self._names if self._has_criterion else self._takes(LABELS)
            if labels is not None and takes:
                entries.setdefault(LABELS, labels)
        else:
            raise UsageError(
                f"a batch must be a dict of the keywords of {self._module}.forward, or (inputs, labels), got "
                f"{no_pair(batch)}"
            )
        if not self._takes(LABELS):
            entries.pop(LABELS, None)
        if others := [name for name in entries if not self._takes(name)]:
            raise UsageError(
                f"{self._module}.forward has no parameter {others[0]!r}, an entry of the batch: it takes "
                f"{sorted(self._names)}"
            )
        return entries, labels

    def arguments(self, entries: Mapping[str, Any]) -> Batch:
        """The arguments of the forward for these entries."""
        rest = dict(entries)
        first = [rest.pop(name) for name in self._by_position_only if name in rest]
        if self._takes_more and (more := [name for name in rest if name.isdigit()]):
            before = [name for name in self._positional if name not in self._by_position_only]
            first += [rest.pop(name) for name in before]
            first += [rest.pop(name) for name in sorted(more, key=int)]
        return tuple(first), rest

    def _bound(self, inputs: object) -> dict[str, Any]:
        given = list(inputs) if isinstance(inputs, tuple | list) else [inputs]
        names = [*self._positional]
        if self._takes_more:
            names += [str(index) for index in range(len(names), len(given))]
        if len(given) > len(names):
            raise UsageError(f"{self._module}.forward takes {len(names)} arguments, the batch has {len(given)} inputs")
        return dict(zip(names, given, strict=False))

    def _takes(self, name: str) -> bool:
        return name in self._names or self._takes_any or (self._takes_more and name.isdigit())


def no_pair(batch: object) -> str:
    """What a batch is that is no pair, and how to make it one."""
    kind = type(batch).__name__
    if isinstance(batch, tuple | list) and len(batch) > 2:
        inputs = ", ".join(f"input{index}" for index in range(1, len(batch)))
        return f"a {kind} of {len(batch)}: several inputs are one tuple or a dict, as in (({inputs}), labels)"
    return f"{kind}; without labels pass (inputs, None)"
