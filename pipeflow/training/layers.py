"""The layers of a model as a list, each made or still to be made. What must not live here: which rank makes which."""

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
"""Each layer is a module, or a callable that makes one; its input is what the layer before it returns."""

_DRAWING = Lock()  # torch's default generator is one for all ranks that are threads


def named_layers(layers: Layers) -> dict[str, Layer]:
    """The layers by their names, which are their positions unless an nn.Sequential says otherwise.

    Raises UsageError for what is no list of layers, and for an nn.Sequential that is more than its layers: with a
    forward, parameters or buffers of its own.
    """
    if isinstance(layers, nn.Sequential | nn.ModuleList):
        _require_plain(layers)
        children = layers.named_modules(remove_duplicate=False)
        found: dict[str, Layer] = {name: child for name, child in children if name and "." not in name}
    elif isinstance(layers, Sequence) and not isinstance(layers, str):
        found = {str(index): layer for index, layer in enumerate(layers)}
    else:
        raise UsageError(
            f"layers are an nn.Sequential, or a list of modules and of callables that make them, got "
            f"{type(layers).__name__}"
        )
    for name, layer in found.items():
        if not callable(layer):
            raise UsageError(f"layer {name} is neither a module nor a callable that makes one, but {layer!r}")
    return found


def _require_plain(layers: nn.Sequential | nn.ModuleList) -> None:
    kind = type(layers)
    own = [name for name, _ in (*layers.named_parameters(recurse=False), *layers.named_buffers(recurse=False))]
    if isinstance(layers, nn.Sequential) and kind.forward is not nn.Sequential.forward:
        raise UsageError(f"{kind.__name__} has a forward of its own, which stages would not run: pass a list of layers")
    if own:
        raise UsageError(f"{own[0]} belongs to the {kind.__name__} and to none of its layers: put it into a layer")


def make_layer(name: str, layer: Layer) -> nn.Module:
    """The layer itself, made if it is not yet. Raises UsageError where a callable makes something else than a module;
    errors of the callable's own pass, with a note of which layer it was to make.
    """
    if isinstance(layer, nn.Module):
        return layer
    try:
        made = layer()
    except Exception as error:
        error.add_note(f"layer {name} was being made, by {layer!r}")
        raise
    if not isinstance(made, nn.Module):
        raise UsageError(f"layer {name} is to be made by {layer!r}, which returned {type(made).__name__}, not a module")
    return made


@contextmanager
def drawing_from(seed: object) -> Iterator[None]:
    """Inside, torch's default generators start from `seed`, a number or a text; afterwards they are as they were
    before. One thread at a time.
    """
    with _DRAWING, random_state_kept():
        torch.manual_seed(Random(str(seed)).getrandbits(63))
        yield


def random_state_kept() -> AbstractContextManager[None]:
    """After it torch's default generators, that of the current device among them, are as they were before."""
    available = torch.accelerator.current_accelerator(check_available=True) is not None
    context: AbstractContextManager[None] = torch.random.fork_rng(
        [torch.accelerator.current_device_index()] if available else []
    )
    return context
