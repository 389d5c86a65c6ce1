"""Change: what becomes of a layer, and small questions about names and modules that finding changes asks."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from torch import Tensor, nn

from pipeflow.tensor.converted import is_conv1d
from pipeflow.tensor.rules import Rule

_ADAPTED = re.compile(r"(?P<site>.+)\.(base_layer|lora_(?P<factor>[AB])\.[^.]+)")


@dataclass(frozen=True, slots=True)
class Place:
    """A module and where it is.

    Attributes:
        name: its full one.
        module: itself.
        around: the module that has it, that of the outermost is itself. What belongs to a LoRA adapter has the place of
            the layer that the adapter stands for.
        site: the name that layer rules match: its own, or that of the layer which the adapter stands for.
        factor: "A" or "B" for the factors of an adapter, of which the first is applied first.
    """

    name: str
    module: nn.Module
    around: nn.Module
    site: str
    factor: str

    def full(self, leaf: str) -> str:
        """The full name of what the module has."""
        return f"{self.name}.{leaf}" if self.name else leaf


@dataclass(slots=True)
class Change:
    """What becomes of a layer.

    Attributes:
        place: of the layer.
        rule: what is done with it.
        parts: the sizes of what it computes in one.
        shared: of these, the ones that several ranks share, and how many share one.
    """

    place: Place
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
        """Along which its weight is split."""
        return int((self.rule.kind == "row") != is_conv1d(self.layer))


def places_in(modules: Sequence[nn.Module]) -> Iterator[Place]:
    """All modules, each once, but for those that torch's attention computes without calling them."""
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
            yield Place(name, module, root.get_submodule(site.rpartition(".")[0]), site, factor)


def integers_of(module: nn.Module) -> dict[str, int]:
    """Its own attributes that are integers."""
    return {name: each for name, each in vars(module).items() if isinstance(each, int) and not isinstance(each, bool)}


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Its own parameters, and the tensors that stand in the places of those that another stage has."""
    own = {name: each for name, each in module._parameters.items() if each is not None}
    return own | {name: each for name, each in vars(module).items() if isinstance(each, Tensor) and each.dim()}
