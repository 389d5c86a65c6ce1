"""Change: the planned change of a layer, and small queries about names and modules that are used to find changes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from torch import Tensor, nn

from pipeflow.engine.tensor.converted import is_conv1d
from pipeflow.engine.tensor.rules import Rule

_ADAPTED = re.compile(r"(?P<site>.+)\.(base_layer|lora_(?P<factor>[AB])\.[^.]+)")


@dataclass(frozen=True, slots=True)
class ModulePlace:
    """A module and its place in the model.

    Attributes:
        name: full name of the module.
        module: the module.
        around: the module that contains it; the outermost module contains itself. Modules of a LoRA adapter have the
            place of the layer that the adapter replaces.
        site: the name that rules for layers match: its own, or that of the layer that its adapter replaces.
        factor: "A" or "B" for the first and second factor of an adapter, else empty.
    """

    name: str
    module: nn.Module
    around: nn.Module
    site: str
    factor: str

    def full(self, leaf: str) -> str:
        """The full name of `leaf`, an attribute of the module."""
        return f"{self.name}.{leaf}" if self.name else leaf


@dataclass(slots=True)
class Change:
    """The planned change of a layer.

    Attributes:
        place: place of the layer.
        rule: the rule that applies.
        parts: sizes of the blocks of a packed layer.
        shared: for each block whose heads several ranks share, by index, how many ranks share a head.
    """

    place: ModulePlace
    rule: Rule
    parts: tuple[int, ...] = ()
    shared: dict[int, int] = field(default_factory=dict)

    @property
    def layer(self) -> nn.Module:
        return self.place.module

    @property
    def name(self) -> str:
        return self.place.name

    @property
    def dimension(self) -> int:
        """The dimension along which its weight is split."""
        return int((self.rule.kind == "row") != is_conv1d(self.layer))


def places_in(modules: Sequence[nn.Module]) -> Iterator[ModulePlace]:
    """All modules, each once, except the children of nn.MultiheadAttention, which are not called."""
    seen: set[int] = set()
    for root in modules:
        for name, module in root.named_modules():
            if id(module) in seen:
                continue
            seen.add(id(module))
            if isinstance(module, nn.MultiheadAttention):
                seen.update(map(id, module.modules()))
            adapted = _ADAPTED.fullmatch(name)
            site, factor = (name, "") if adapted is None else (adapted["site"], adapted["factor"] or "")
            yield ModulePlace(name, module, root.get_submodule(site.rpartition(".")[0]), site, factor)


def integers_of(module: nn.Module) -> dict[str, int]:
    """The attributes of the module itself that are integers, by name."""
    return {name: each for name, each in vars(module).items() if isinstance(each, int) and not isinstance(each, bool)}


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """The module's own parameters, and the tensors that stand for parameters of another stage."""
    own = {name: each for name, each in module._parameters.items() if each is not None}
    return own | {name: each for name, each in vars(module).items() if isinstance(each, Tensor) and each.dim()}
