"""Sharding of any module: what its rules say, found first and checked, then done to its layers where they stand. What
must not live here: how a layer computes.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from pipeflow.core.errors import UsageError
from pipeflow.parallel.sharding import Split, splits_of
from pipeflow.parallel.transport.group import Group
from pipeflow.tensor.converted import (
    Told,
    become_embedding,
    become_linear,
    become_told,
    is_conv1d,
    is_embedding,
    is_linear,
    sizes_of,
)
from pipeflow.tensor.division import cut
from pipeflow.tensor.layer import TensorLayer, group_of
from pipeflow.tensor.rules import DEFAULT_RULES, Kind, Rule, first_match

_LAYERS: tuple[Kind, ...] = ("column", "row", "vocabulary", "head", "whole")
LOG = logging.getLogger("pipeflow")
_HEAD_SIZES = ("head_dim", "attention_head_size", "key_value_proj_dim", "d_head")


def shard(*modules: nn.Module, rules: Sequence[Rule] = DEFAULT_RULES, group: Group | None = None) -> None:
    r"""Splits the parameters of any module over the tensor ranks, in place: each rank keeps its part of the weights
    that it has, which are to be the same on every rank, and computes with its part. What the module takes and returns
    stays whole and the same on every rank. Names stay; parameters that are shared stay shared.

    Args:
        modules: all of those that share parameters, such as this rank's stages.
        rules: which layers are split, and how. A rule of your own comes first, as in
            `rules=[Rule("column", r"attn\.qkv", parts=3), *DEFAULT_RULES]`.
        group: by default the tensor group of the context, and without a launch the group of one.

    An embedding, and a head that shares its weight, are split for any size of the vocabulary. Layers of which a rule
    knows the name but not the kind, such as convolutions, and those within nn.MultiheadAttention stay whole.

    Raises UsageError, and changes nothing, for a rule of your own that matches nothing, and for a tensor size that does
    not divide heads or a width; it says which sizes do.
    """
    group = group_of(group)
    for rule in rules:
        if not isinstance(rule, Rule):
            raise UsageError(f"rules are pipeflow.tensor.Rule objects, got {rule!r}")
    plan = _Plan(modules, rules, group)
    if group.size > 1:
        plan.carry_out()
        if rules and not plan.layers and group.rank == 0:
            LOG.warning(
                "no rule matches a layer of %s, so all %d tensor ranks compute the same: see pipeflow.tensor.Rule",
                ", ".join(sorted({type(module).__name__ for module in modules})),
                group.size,
            )


@dataclass(slots=True)
class _Change:
    """What becomes of a layer."""

    name: str
    layer: nn.Module
    rule: Rule
    parts: tuple[int, ...] = ()


@dataclass(slots=True)
class _Plan:
    """All that the rules change; found and checked when it is made."""

    modules: Sequence[nn.Module]
    rules: Sequence[Rule]
    group: Group
    layers: list[_Change] = field(default_factory=list)
    told: list[tuple[nn.Module, str, Rule]] = field(default_factory=list)
    attributes: list[tuple[nn.Module, str]] = field(default_factory=list)
    used: set[Rule] = field(default_factory=set)

    def __post_init__(self) -> None:
        named = list(_named(self.modules))
        for name, module in named:
            if (change := self._change(name, module)) is not None:
                self.layers.append(change)
        self._keep_whole_together([module for _, module in named])
        around = {_parent(change.name) for change in self.layers if change.rule.kind == "column"}
        near = around.union(map(_parent, around))
        for name, module in named:
            self._find_attributes(name, module, name in around)
            is_inside = name in around or _parent(name) in around
            self._find_parameters(name, module, {"partial": is_inside, "heads": is_inside or _parent(name) in near})
            if name in around:
                self._require_heads(name, module)
        for change in self.layers:
            self._require_width(change)
        for rule in self.rules:
            if rule not in self.used and rule not in DEFAULT_RULES:
                raise UsageError(
                    f"{rule} matches nothing in the module: a pattern is a regular expression for the end of a full "
                    f"name, such as {named[-1][0]!r}"
                )

    def _change(self, name: str, module: nn.Module) -> _Change | None:
        rule = first_match(self.rules, name, _LAYERS)
        if rule is None:
            return None
        self.used.add(rule)
        fits = is_embedding(module) if rule.kind == "vocabulary" else is_linear(module) or is_conv1d(module)
        if rule.kind == "head":
            fits = is_linear(module)
        if not fits or rule.kind == "whole" or isinstance(module, TensorLayer):
            if rule not in DEFAULT_RULES and rule.kind != "whole" and next(module.children(), None) is None:
                raise UsageError(f"{rule} matches {name}, which is a {type(module).__name__} that it cannot split")
            return None
        parts = rule.sizes(name, sizes_of(module)[1]) if rule.kind == "column" else ()
        return _Change(name, module, rule, parts)

    def _keep_whole_together(self, modules: Sequence[nn.Module]) -> None:
        """Leaves those layers whole that share their weight with one that stays so or is split in another way."""
        while True:
            ways: dict[int, set[int | None]] = defaultdict(set)
            by_layer = {id(change.layer): change for change in self.layers}
            for module in modules:
                for name, parameter in module._parameters.items():
                    if name == "weight" and parameter is not None:
                        change = by_layer.get(id(module))
                        ways[id(parameter)].add(None if change is None else _dimension(change))
            kept = [each for each in self.layers if len(ways.get(id(each.layer._parameters.get("weight")), ())) < 2]
            if len(kept) == len(self.layers):
                return
            self.layers = kept

    def _find_attributes(self, name: str, module: nn.Module, has_columns: bool) -> None:
        for attribute, value in vars(module).items():
            if isinstance(value, int) and not isinstance(value, bool):
                full = f"{name}.{attribute}" if name else attribute
                rule = first_match(self.rules, full, ("attribute",))
                if rule is not None and (has_columns or rule not in DEFAULT_RULES):
                    self.used.add(rule)
                    self._require(value, full)
                    self.attributes.append((module, attribute))

    def _find_parameters(self, name: str, module: nn.Module, is_near: Mapping[Kind, bool]) -> None:
        """`is_near` says per kind whether there are layers split by columns so near that the default rules count."""
        for leaf in [*module._parameters, *(key for key, value in vars(module).items() if isinstance(value, Tensor))]:
            full = f"{name}.{leaf}" if name else leaf
            rule = first_match(self.rules, full, ("heads", "partial")) or first_match(self.rules, name, ("partial",))
            parameter = getattr(module, leaf)
            if rule is None or parameter is None or isinstance(module, Told | TensorLayer):
                continue
            self.used.add(rule)
            if not is_near[rule.kind] and rule in DEFAULT_RULES:
                continue
            if not name:
                raise UsageError(f"{rule} matches {full} of the module itself: put it in a module within")
            if rule.kind == "heads":
                if not 0 <= rule.dim < parameter.dim():
                    raise UsageError(f"{rule} matches {full}, whose shape is {tuple(parameter.shape)}")
                self._require(parameter.shape[rule.dim], f"dimension {rule.dim} of {full}")
            if leaf in module._parameters:
                self.told.append((module, leaf, rule))

    def _require_heads(self, name: str, module: nn.Module) -> None:
        size = next((vars(module)[each] for each in _HEAD_SIZES if isinstance(vars(module).get(each), int)), None)
        if size is None:
            return
        for change in self.layers:
            if change.rule.kind == "column" and _parent(change.name) == name:
                for part in change.parts:
                    if part % size == 0:
                        self._require(part // size, f"the number of heads of {change.name}")
        for child, layer in module.named_children():
            norm = first_match(self.rules, f"{name}.{child}", ("partial",))
            for parameter in layer._parameters.values():
                if norm is not None and parameter is not None and parameter.shape[-1] != size:
                    raise UsageError(
                        f"{name}.{child} is as wide as all heads together, so one rank cannot compute it from its own "
                        'heads: keep the attention whole, with Rule("whole", ...) for it and its layers'
                    )

    def _require_width(self, change: _Change) -> None:
        name = change.name
        if change.rule.kind == "row":
            self._require(sizes_of(change.layer)[0], f"the number of inputs of {name}")
        elif change.rule.kind == "column":
            for part in change.parts:
                self._require(part, f"the number of outputs of {name}")

    def _require(self, number: int, what: str) -> None:
        """Raises UsageError unless the tensor size divides a number."""
        if number % self.group.size:
            sizes = ", ".join(str(size) for size in range(1, number + 1) if number % size == 0)
            raise UsageError(
                f"{what} is {number}, which {self.group.size} tensor ranks cannot share: choose a tensor size of "
                f"{sizes}"
            )

    def carry_out(self) -> None:
        """Makes the changes."""
        for change in self.layers:
            if any(isinstance(value, Tensor) for value in vars(change.layer).values()):
                continue  # it is another stage's, which has the parameters that are plain tensors here
            if change.rule.kind == "vocabulary":
                become_embedding(change.layer, self.group)
            else:
                become_linear(change.layer, change.rule.kind, change.parts, self.group)
        for module, leaf, rule in self.told:
            if rule.kind == "heads":
                split = Split(rule.dim, module._parameters[leaf].shape[rule.dim])  # type: ignore[union-attr]  # found there
                become_told(module, {leaf: split}, ())
            else:
                become_told(module, {}, (leaf,))
        for module, attribute in self.attributes:
            vars(module)[attribute] //= self.group.size
        self._cut()

    @torch.no_grad()
    def _cut(self) -> None:
        """Cuts each split parameter once."""
        whole = nn.ModuleList(self.modules)
        splits = splits_of(whole)
        done = {id(change.layer) for change in self.layers} | {id(module) for module, _, _ in self.told}
        seen: set[int] = set()
        for layer in (module for module in whole.modules() if id(module) in done):
            for parameter in layer._parameters.values():
                if parameter is not None and id(parameter) in splits and id(parameter) not in seen:
                    seen.add(id(parameter))
                    parameter.data = cut(parameter, splits[id(parameter)], self.group)
                    parameter.grad = None


def _named(modules: Sequence[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """All modules, each once, but for those that torch's attention computes without calling them."""
    seen: set[int] = set()
    for root in modules:
        for name, module in root.named_modules():
            if id(module) in seen:
                continue
            seen.add(id(module))
            if isinstance(module, nn.MultiheadAttention):
                seen.update(map(id, module.modules()))
            yield name, module


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


def _dimension(change: _Change) -> int:
    """Along which its weight is split."""
    return int((change.rule.kind == "row") != is_conv1d(change.layer))
