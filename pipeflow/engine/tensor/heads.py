"""Whether what lies between a layer that is split by columns and one that is split by rows can be split, too: an
attention, of which each tensor rank gets some heads, or code that computes each output by itself. It is split only if
it is certain to compute the same, because a wrong result would go unnoticed. And what is asked of all layers: their
places, and the changes that are planned for them.
"""

from __future__ import annotations

import copy
import dis
import inspect
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

import torch
from torch import Tensor, nn

from pipeflow.core.errors import UsageError
from pipeflow.engine.tensor.converted import is_conv1d, sizes_of
from pipeflow.engine.tensor.rules import Rule, attribute_of, config_rule, first_match, has_attribute
from pipeflow.engine.torch_private.modes import disable_current_modes

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


RuleKind = Callable[[ModulePlace, str], str | None]
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


def _leaves(change: Change) -> Iterator[tuple[ModulePlace, str, Tensor]]:
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
    with torch.no_grad(), disable_current_modes():
        whole = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64, device="cpu")
        try:
            function = copy.deepcopy(module).eval()
            made, half = function(whole), function(whole[..., :4])
            return made.shape == whole.shape and torch.allclose(made[..., :4], half)
        except Exception:  # it takes something else
            return False


_SIZES = (
    "head_dim",
    "attention_head_size",
    "head_size",
    "key_value_proj_dim",
    "d_head",
    "hidden_size_per_attention_head",
)
_COUNTS = re.compile(r"head|group")


class Doubt(Exception):  # noqa: N818  # a reason to leave an attention whole, not an error for users
    """The reason why an attention stays whole."""


@dataclass(slots=True)
class AttentionLayers:
    """A module with layers of query, key and value.

    Attributes:
        place: place of the module.
        changes: changes of its layers of query, key and value.
        kind_of: the kind of the rule that covers a parameter of a module within.
        rules: all rules.
        ranks: number of tensor ranks.
    """

    place: ModulePlace
    changes: Sequence[Change]
    kind_of: RuleKind
    rules: Sequence[Rule]
    ranks: int

    def settle(self) -> None:
        """Sets for each layer which of its parts are shared, and by how many ranks.

        Raises Doubt if pipeflow cannot prove that the split is safe, and UsageError if the number of ranks does not
        divide the heads.
        """
        size = self._head_size()
        if size is None:
            raise Doubt("none of its attributes says how many heads it has, or how large they are")
        self._require_known_counts()
        self._require_covered(size)
        units = [
            (change, index, self._units(change, index, size))
            for change in self.changes
            for index in range(len(change.parts))
        ]
        queries = [number for change, index, number in units if index not in change.rule.shared]
        keys = [number for change, index, number in units if index in change.rule.shared]
        for change, index, number in sorted(units, key=lambda unit: unit[1] in unit[0].rule.shared):
            is_shared = index in change.rule.shared and number < self.ranks
            if not is_shared and number % self.ranks:
                raise _undivided(change.name, number, self.ranks, queries, keys)
            if is_shared and (self.ranks % number or change.parts[index] % self.ranks):
                raise _undivided(change.name, number, self.ranks, queries, keys)
            if is_shared:
                change.shared[index] = self.ranks // number

    def _head_size(self) -> int | None:
        own = vars(self.place.module)
        if (size := next((own[name] for name in _SIZES if isinstance(own.get(name), int)), None)) is not None:
            return int(size)
        for name, value in integers_of(self.place.module).items():
            rule = first_match(self.rules, self.place.full(name), ("attribute",), self.place.module)
            if "head" in name and rule is not None and not rule.shared:
                for change in self.changes:
                    if 0 not in change.rule.shared and isinstance(change.rule.together, int):
                        return change.parts[0] // (change.rule.together * value) or None
        return None

    def _units(self, change: Change, index: int, size: int) -> int:
        """The number of heads, or of groups of heads that lie together, in a part of a layer."""
        together, part = change.rule.together, change.parts[index]
        if isinstance(together, str):
            number = vars(self.place.module).get(together)
            if not isinstance(number, int) or part % number:
                raise Doubt(f"{change.name} has {part} outputs, but {together} is {number}")
            return number
        if part % (size * together):
            raise Doubt(f"{change.name} has {part} outputs, which cannot be divided into heads of size {size}")
        return part // (size * together)

    def _require_known_counts(self) -> None:
        own = [name for name in integers_of(self.place.module) if _COUNTS.search(name) and name not in _SIZES]
        for name in own:
            if first_match(self.rules, self.place.full(name), ("attribute", "groups"), self.place.module) is None:
                raise Doubt(f"no rule says what its attribute {name} counts")
        for name in read_of_config(self.place.module):
            full = self.place.full(name)
            counts = first_match(self.rules, full, ("attribute",), self.place.module) is not None
            if counts and config_rule(self.rules, self.place.full(f"config.{name}"), self.place.module) is None:
                raise Doubt(f"it reads {name} from its config, which all modules share")

    def _require_covered(self, size: int) -> None:
        for inner in places_in([self.place.module]):
            place = replace(inner, name=self.place.full(inner.name) if inner.name else self.place.name)
            for leaf, tensor in tensors_of(place.module).items():
                kind = self.kind_of(place, leaf)
                if kind is None:
                    raise Doubt(f"no rule says how {place.full(leaf)} is split along with heads")
                if kind == "partial" and tensor.dim() and tensor.shape[-1] != size:
                    raise Doubt(f"{place.name} is as wide as all heads together, so a rank cannot compute it alone")


def rule_of_tensor(rules: Sequence[Rule], place: ModulePlace, leaf: str) -> Rule | None:
    """The rule for a parameter itself, or None."""
    of_leaf = first_match(rules, place.full(leaf), ("parameter", "partial"), place.module)
    return of_leaf or first_match(rules, place.name, ("partial",), place.around)


def read_of_config(module: nn.Module) -> list[str]:
    """The integers that the methods of a module, except its constructor, read from its config, according to their
    bytecode.
    """
    config = attribute_of(module, "config")
    if config is None:
        return []
    of_config, elsewhere = _attributes_read(type(module))  # type: ignore[arg-type]  # types are hashable
    named = of_config | {name for name in elsewhere if not has_attribute(module, name)}
    return sorted(name for name in named if isinstance(attribute_of(config, name), int))


@lru_cache(maxsize=1024)
def _attributes_read(kind: type[nn.Module]) -> tuple[frozenset[str], frozenset[str]]:
    """The names that a class reads from `.config`, and those that it reads from any object."""
    of_config: set[str] = set()
    of_any: set[str] = set()
    for base in kind.__mro__:
        for name, method in list(vars(base).items()):  # a copy, since other threads may add to it
            if base.__module__.startswith("torch.") or name == "__init__" or not inspect.isfunction(method):
                continue
            last = ""
            for step in dis.get_instructions(inspect.unwrap(method)):
                is_read = step.opname in ("LOAD_ATTR", "LOAD_METHOD")
                if is_read:
                    (of_config if last == "config" else of_any).add(str(step.argval))
                last = str(step.argval) if is_read else ""
    return frozenset(of_config), frozenset(of_any)


def _undivided(name: str, number: int, ranks: int, whole: Sequence[int], shared: Sequence[int]) -> UsageError:
    """The error that lists possible tensor sizes: they must divide all of `whole`, and divide or be a multiple of each
    of `shared`.
    """
    sizes = [
        size
        for size in range(1, max([*whole, number]) + 1)
        if all(each % size == 0 for each in whole) and all(each % size == 0 or size % each == 0 for each in shared)
    ]
    return UsageError(
        f"the number of heads of {name} is {number}, which {ranks} tensor ranks cannot share: choose a tensor size of "
        f"{', '.join(map(str, sizes))}"
    )
