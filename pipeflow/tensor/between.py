"""Between: whether what lies between a column-parallel layer and the row-parallel layer that takes its outputs computes
each output by itself. Must not contain: attentions, which heads.py decides about.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from pipeflow.tensor.change import Change, Place, places_in, tensors_of
from pipeflow.tensor.converted import sizes_of

RuleKind = Callable[[Place, str], str | None]
"""The kind of the rule that covers a parameter of a module, or None."""


def widths_taken(changes: Sequence[Change], outer: Mapping[int, nn.Module]) -> dict[int, set[int]]:
    """By the id of a module, the numbers of inputs of its row-parallel layers; if it has none, of its children's."""
    own: dict[int, set[int]] = defaultdict(set)
    of_children: dict[int, set[int]] = defaultdict(set)
    for change in changes:
        if change.rule.kind == "row":
            own[id(change.place.around)].add(sizes_of(change.layer)[0])
            of_children[id(outer[id(change.place.around)])].add(sizes_of(change.layer)[0])
    return {**of_children, **own}


def reason_to_keep(change: Change, taken: Collection[int], kind_of: RuleKind) -> str | None:
    """Why a column-parallel layer must stay whole; None if the layers that take `taken` inputs can take its outputs in
    parts.
    """
    if not taken:
        return "no rule splits the inputs of a layer after it, so nothing takes its outputs in parts"
    if not set(taken).intersection(change.parts):
        return f"its outputs are not {len(change.parts)} times the inputs of the layer after it"
    return _of_parameters(change, taken, kind_of) or _of_functions(change)


def _of_parameters(change: Change, taken: Collection[int], kind_of: RuleKind) -> str | None:
    inputs, partial, uncovered = sizes_of(change.layer)[0], "", ""
    for place, leaf, tensor in _leaves(change):
        kind = kind_of(place, leaf)
        if set(taken).intersection(tensor.shape) and inputs not in tensor.shape and kind in (None, "partial"):
            return f"no rule says how {place.full(leaf)} is split along with its outputs"
        partial = place.full(leaf) if kind == "partial" else partial
        uncovered = place.full(leaf) if kind is None else uncovered
    if partial and uncovered:
        return f"pipeflow cannot prove that {partial} is used with its outputs, since no rule covers {uncovered}"
    return None


def _leaves(change: Change) -> Iterator[tuple[Place, str, Tensor]]:
    """The parameters of the module around a layer, with their places."""
    name = change.place.site.rpartition(".")[0]
    for inner in places_in([change.place.around]):
        place = replace(inner, name=f"{name}.{inner.name}" if inner.name else name)
        yield from ((place, leaf, tensor) for leaf, tensor in tensors_of(inner.module).items())


def _of_functions(change: Change) -> str | None:
    for name, module in change.place.around.named_modules():
        is_list = isinstance(module, nn.ModuleList | nn.ModuleDict)  # it is not called
        if not is_list and not any(map(tensors_of, module.modules())) and not computes_each(module):
            return f"{name}, a {type(module).__name__}, may compute with all of its outputs together"
    return None


def computes_each(module: nn.Module) -> bool:
    """Returns True if a module without parameters computes each feature by itself, tried on random numbers; dropout
    counts as such. The numbers are real even while a plan is made with fake tensors.
    """
    if next(module.buffers(), None) is not None:
        return False
    with torch.no_grad(), _disable_current_modes():
        whole = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64, device="cpu")
        try:
            function = copy.deepcopy(module).eval()
            made, half = function(whole), function(whole[..., :4])
            return made.shape == whole.shape and torch.allclose(made[..., :4], half)
        except Exception:  # it takes something else
            return False
