"""The layers of a model as a list of modules, or of callables that make them, and a registry of such callables by name.
Must not contain: which rank makes which layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from inspect import signature
from random import Random
from threading import Lock
from types import ModuleType
from typing import Any, TypeVar

import torch
from torch import nn

from pipeflow.core.errors import UsageError, closest

Layer = nn.Module | Callable[[], nn.Module]
Layers = nn.Sequential | nn.ModuleList | Sequence[Layer]
"""Each layer is a module, or a callable that makes one; its input is the output of the layer before it."""

_DRAWING = Lock()  # ranks that are threads share torch's default generator


def named_layers(layers: Layers) -> dict[str, Layer]:
    """The layers by name: their names in an nn.Sequential, else their positions in the list.

    Raises UsageError if `layers` is not a list of layers, or is an nn.Sequential with a forward, parameters or buffers
    of its own.
    """
    if isinstance(layers, nn.Sequential | nn.ModuleList):
        _require_plain(layers)
        children = layers.named_modules(remove_duplicate=False)
        found: dict[str, Layer] = {name: child for name, child in children if name and "." not in name}
    elif isinstance(layers, Sequence) and not isinstance(layers, str):
        found = {str(index): layer for index, layer in enumerate(layers)}
    else:
        raise UsageError(
            f"layers must be an nn.Sequential, or a list of modules and of callables that make them, got "
            f"{type(layers).__name__}"
        )
    for name, layer in found.items():
        if not callable(layer):
            raise UsageError(f"layer {name} must be a module or a callable that makes one, got {layer!r}")
    return found


def _require_plain(layers: nn.Sequential | nn.ModuleList) -> None:
    kind = type(layers)
    own = [name for name, _ in (*layers.named_parameters(recurse=False), *layers.named_buffers(recurse=False))]
    if isinstance(layers, nn.Sequential) and kind.forward is not nn.Sequential.forward:
        raise UsageError(f"{kind.__name__} has its own forward, which stages would not run: pass a list of layers")
    if own:
        raise UsageError(f"{own[0]} belongs to the {kind.__name__}, not to one of its layers: put it into a layer")


def make_layer(name: str, layer: Layer) -> nn.Module:
    """The layer as a module; a callable is called. Raises UsageError if the callable does not return a module. An error
    in the callable gets a note that names the layer.
    """
    if isinstance(layer, nn.Module):
        return layer
    try:
        made = layer()
    except Exception as error:
        error.add_note(f"while making layer {name} with {layer!r}")
        raise
    if not isinstance(made, nn.Module):
        raise UsageError(f"layer {name}: {layer!r} must return a module, but returned a {type(made).__name__}")
    return made


@contextmanager
def drawing_from(seed: object) -> Iterator[None]:
    """Seeds torch's default generators with `seed`, a number or a text, inside the `with` block, and restores them
    after. Only one thread at a time can be inside.
    """
    with _DRAWING, random_state_kept():
        torch.manual_seed(Random(str(seed)).getrandbits(63))
        yield


def random_state_kept() -> AbstractContextManager[None]:
    """Restores torch's default generators, including the current device's, after the `with` block."""
    available = torch.accelerator.current_accelerator(check_available=True) is not None
    context: AbstractContextManager[None] = torch.random.fork_rng(
        [torch.accelerator.current_device_index()] if available else []
    )
    return context


C = TypeVar("C")


class Registry:
    """Classes and functions by name.

    Args:
        name: name of the registry, for errors.
        third_party_library: Python modules whose classes can be looked up too.

    >>> layers = Registry("layers")
    >>> @layers.register_module
    ... class Block: ...
    >>> layers.get_module("Block") is Block
    True
    """

    def __init__(self, name: str, third_party_library: Sequence[ModuleType] = ()) -> None:
        self.name = name
        self._libraries = tuple(third_party_library)
        self._modules: dict[str, Any] = {}

    def register_module(self, module: C) -> C:
        """Registers a class or function under its name and returns it; can be used as a decorator. Raises UsageError if
        another one has that name.
        """
        name: str = module.__name__  # type: ignore[attr-defined]  # a class or a function
        known = self._modules.setdefault(name, module)
        if _origin(known) != _origin(module):
            raise UsageError(f"{self.name} already has another {name!r}, from {known.__module__}: rename one of them")
        self._modules[name] = module
        return module

    def get_module(self, name: str) -> Any:
        """Returns the class or function `name`. Raises UsageError if there is none."""
        found = self._found(name)
        if found is None:
            near = closest(name, self._names(), cutoff=0.0)
            hint = f": did you mean {near!r}?" if near else ": register it with register_module"
            raise UsageError(f"{self.name} has no {name!r}{hint}")
        return found

    def has(self, name: str) -> bool:
        """True if `name` is registered, or a class of one of the libraries."""
        return self._found(name) is not None

    def _names(self) -> list[str]:
        of_libraries = (name for library in self._libraries for name in vars(library) if self.has(name))
        return [*self._modules, *of_libraries]

    def _found(self, name: str) -> Any:
        if name in self._modules:
            return self._modules[name]
        found = (vars(library).get(name) for library in self._libraries)
        return next((each for each in found if isinstance(each, type)), None)


def makers(specifications: Sequence[Mapping[str, Any]], *registries: Registry) -> list[Callable[[], Any]]:
    """Returns a callable for each specification that makes the specified object when it is called.

    Args:
        specifications: dicts; "type" names a class, the other entries are its keyword arguments.
        registries: where to look up the class; the first registry that has the name is used.

    >>> layers = Registry("layers")
    >>> _ = layers.register_module(complex)
    >>> [make] = makers([{"type": "complex", "real": 1, "imag": 2}], layers)
    >>> make()
    (1+2j)

    Raises UsageError if `specifications` is not a list of such dicts, if no registry has the name, or if the class does
    not take the arguments.
    """
    if isinstance(specifications, str | Mapping) or not isinstance(specifications, Sequence):
        raise UsageError(
            f"layers must be specified by a list of dicts such as {_EXAMPLE}, got {type(specifications).__name__}"
        )
    return [_maker(index, each, registries) for index, each in enumerate(specifications)]


_EXAMPLE = '{"type": "Linear", "in_features": 4, "out_features": 4}'


def _maker(index: int, specification: object, registries: Sequence[Registry]) -> Callable[[], Any]:
    if not isinstance(specification, Mapping) or not isinstance(specification.get("type"), str):
        raise UsageError(
            f'layer {index} must be a dict whose "type" is a name, such as {_EXAMPLE}, got {specification!r}'
        )
    name, arguments = specification["type"], {key: value for key, value in specification.items() if key != "type"}
    registry = next((each for each in registries if each.has(name)), registries[0])
    kind = registry.get_module(name)
    try:
        signature(kind).bind(**arguments)
    except TypeError as error:
        raise UsageError(f"layer {index}, {name!r} of {registry.name}: {error}") from None
    return partial(kind, **arguments)


def _origin(module: Any) -> tuple[str, str]:
    """Module and name where it is defined; they stay the same if the module is imported again."""
    return module.__module__, module.__qualname__
