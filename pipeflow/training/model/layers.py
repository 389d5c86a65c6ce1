"""The layers of a model as a list of modules, or of callables that make them. Must not contain: which rank makes which
layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from random import Random
from threading import Lock

import torch
from torch import nn

from pipeflow.core.errors import UsageError

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
