"""PipelinableModel: a stage whose layers are called one after the other, with functions between them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from inspect import signature
from typing import Any

from torch import nn

Function = Callable[..., Any]
Functions = dict[str, list[Function]]
"""Functions by the name of a layer, which is its index in the whole model."""


class PipelinableModel(nn.Module):
    """A stage. Each layer gets the output before it, and the entries of the batch that its forward has parameters for.

    Args:
        layers: the layers, named by their index in the whole model.
        fronts, behinds: functions before and behind layers, by these names. A function whose parameters are entries of
            the batch replaces these for the following layers; any other changes what passes between the layers.
    """

    def __init__(self, layers: nn.Module, fronts: Functions, behinds: Functions) -> None:
        super().__init__()
        self.layers = layers
        self._functions = {name: (fronts.get(name, []), behinds.get(name, [])) for name, _ in layers.named_children()}

    def forward(self, *inputs: Any, **entries: Any) -> Any:
        for name, layer in self.layers.named_children():
            fronts, behinds = self._functions[name]
            for function in fronts:
                inputs = _through(function, inputs, entries)
            inputs = _called(layer, _names_of(layer.forward), inputs, entries)
            for function in behinds:
                inputs = _through(function, inputs, entries)
        return inputs[0] if len(inputs) == 1 else inputs


def _through(function: Function, inputs: tuple[Any, ...], entries: dict[str, Any]) -> tuple[Any, ...]:
    """The inputs after a function; or it replaces entries."""
    names = [name for name in _names_of(function) if name in entries]
    if not names:
        return _called(function, _names_of(function), inputs, {})
    made = function(**{name: entries[name] for name in names})
    entries.update(zip(names, made if isinstance(made, tuple) else [made] * len(names), strict=True))
    return inputs


def _names_of(function: Function) -> list[str]:
    """The names of its parameters; none for functions written in C, which do not tell."""
    try:
        return list(signature(function).parameters)
    except ValueError:
        return []


def _called(
    function: Function, names: list[str], inputs: tuple[Any, ...], entries: Mapping[str, Any]
) -> tuple[Any, ...]:
    taken = {name: entries[name] for name in names[len(inputs) :] if name in entries}
    made = function(*inputs[: len(names) - len(taken) if names else None], **taken)
    return made if isinstance(made, tuple) else (made,)
