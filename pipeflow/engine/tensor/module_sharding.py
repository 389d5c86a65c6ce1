"""Sharding of any module: finds and checks everything that the rules change, then changes the layers in place. Must not
contain: the computations of layers.
"""

from __future__ import annotations

import copy
import inspect
import logging
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from pipeflow.core.errors import UsageError
from pipeflow.engine.parallel.sharding import Split, splits_of
from pipeflow.engine.parallel.transport.protocol import Group
from pipeflow.engine.tensor.converted import (
    Argument,
    Crossing,
    SplitModule,
    become_crossing,
    become_embedding,
    become_linear,
    become_told,
    is_conv1d,
    is_embedding,
    is_linear,
    sizes_of,
)
from pipeflow.engine.tensor.heads import (
    AttentionLayers,
    Change,
    Doubt,
    ModulePlace,
    integers_of,
    places_in,
    read_of_config,
    reason_to_keep,
    rule_of_tensor,
    tensors_of,
    widths_taken,
)
from pipeflow.engine.tensor.layer import TensorLayer, cut, grid_here, group_of
from pipeflow.engine.tensor.rules import DEFAULT_RULES, Kind, Rule, config_rule, first_match
from pipeflow.engine.tensor.stepping import watch

LOG = logging.getLogger("pipeflow")
_KEY = "pipeflow: known before"
_SPLIT_FACTOR = {"column": ("", "B"), "attention": ("", "B"), "row": ("", "A")}  # the other factor stays whole
_LAYERS: tuple[Kind, ...] = ("column", "attention", "row", "vocabulary", "head", "whole")


def shard(*modules: nn.Module, rules: Sequence[Rule] = DEFAULT_RULES, group: Group | None = None) -> None:
    r"""Splits the parameters of any module over the tensor ranks, in place.

    Each rank keeps its part of the weights, which must be the same on every rank before, and computes with that part.
    Inputs and outputs of the module stay whole and the same on every rank. Names do not change, and shared parameters
    stay shared.

    Args:
        modules: all modules that share parameters, such as this rank's stages.
        rules: which layers are split, and how. Put your own rules first, as in
            `rules=[Rule("attention", r"attn\.qkv", parts=3), *DEFAULT_RULES]`.
        group: the tensor ranks; by default the tensor group of the context, or a group of one without a launch.

    An embedding, and a head that shares its weight, can be split for any vocabulary size. If there are fewer heads of
    key and value than ranks, several ranks share a head. Layers stay whole if a rule matches their name but cannot
    split their class, such as convolutions, and within nn.MultiheadAttention. An attention is split only if pipeflow
    can prove that this is safe: rules must cover all its parameters and counts of heads. A default rule splits a layer
    by columns only in one case: a layer after it takes its outputs in parts, and the modules between the two compute
    each output by itself. Otherwise the layer stays whole. The logger "pipeflow" reports which layers stay whole, and
    why.

    Raises UsageError for a rule of your own that matches nothing. Raises it for a tensor size that does not divide the
    heads or a width; the error names sizes that do. Also raises it if a graph of an earlier forward needs a whole
    parameter, and on a grid of tensor ranks. Nothing is then changed.
    """
    if grid_here(group) is not None:
        raise UsageError(
            "from_module and shard split layers in tensor mode '1d' alone: launch with tensor_mode='1d', or use the "
            "stages of build_gpt_pipeline or others that are made of pipeflow.tensor's layers"
        )
    group = group_of(group)
    for rule in rules:
        if not isinstance(rule, Rule):
            raise UsageError(f"rules are pipeflow.tensor.Rule objects, got {rule!r}")
    found = RuleMatches(modules, rules, group.size)
    if group.size == 1:
        return
    _require_no_graphs(found)
    _carry_out(found, group)
    for module in modules:
        watch(module)
    if rules and not found.layers and group.rank == 0:
        LOG.warning(
            "no rule matches a layer of %s, so all %d tensor ranks compute the same: see pipeflow.tensor.Rule",
            ", ".join(sorted({type(module).__name__ for module in modules})),
            group.size,
        )


def _require_no_graphs(found: RuleMatches) -> None:
    """A graph computes gradients of the size that a parameter had when it was made."""
    split = {id(each) for change in found.layers for each in change.layer._parameters.values()}
    split |= {id(place.module._parameters.get(leaf)) for place, leaf, _ in found.parameters}
    for name, parameter in nn.ModuleList(found.modules).named_parameters():
        if id(parameter) in split and parameter.requires_grad:
            _notes(parameter)[_KEY] = True  # forgotten with the node, unless a graph has it
            if _KEY in _notes(parameter):
                raise UsageError(
                    f"{name.partition('.')[2]} is split, but the graph of an earlier loss or output still needs the "
                    "whole parameter: compute that loss or output under torch.no_grad(), or delete it before"
                )


def _notes(parameter: nn.Parameter) -> dict[str, Any]:
    """The notes at the node of autograd that adds up the parameter's gradient."""
    node: Any = get_gradient_edge(parameter).node
    notes: dict[str, Any] = node.metadata
    return notes


def _carry_out(found: RuleMatches, group: Group) -> None:
    for change in found.layers:
        if any(isinstance(value, Tensor) for value in vars(change.layer).values()):
            continue  # another stage has its parameters; here they are plain tensors
        if change.rule.kind == "vocabulary":
            become_embedding(change.layer, group)
        else:
            become_linear(change.layer, change.rule.kind, change.parts, change.shared, group)
    for place, leaf, split in found.parameters:
        become_told(place.module, {} if split is None else {leaf: split}, (leaf,) if split is None else ())
    for module, arguments, sums in found.crossings:
        become_crossing(module, arguments, sums, group)
    for module, name, value in found.integers:
        vars(module)[name] = value
    for module, values in found.configs:
        module.config = copy.copy(module.config)
        for name, value in values.items():
            setattr(module.config, name, value)
    done = {id(change.layer) for change in found.layers} | {id(place.module) for place, _, _ in found.parameters}
    _cut(nn.ModuleList(found.modules), done, group)


@torch.no_grad()
def _cut(whole: nn.ModuleList, done: set[int], group: Group) -> None:
    """Cuts each split parameter once, in the modules with these ids."""
    splits = splits_of(whole)
    seen: set[int] = set()
    for layer in (module for module in whole.modules() if id(module) in done):
        for parameter in layer._parameters.values():
            if parameter is not None and id(parameter) in splits and id(parameter) not in seen:
                seen.add(id(parameter))
                parameter.data = cut(parameter, splits[id(parameter)], group)
                parameter.grad = None


@dataclass(slots=True)
class RuleMatches:
    """The changes that `rules` make in `modules` for `ranks` tensor ranks.

    Attributes:
        layers: layers to replace.
        parameters: parameters to split, with their place, name and split; the split is None for those whose gradient is
            a part of a sum.
        crossings: modules with arguments to split, and whether to sum their output.
        integers: integer attributes with their new values.
        configs: modules that get their own config, with its new integers.

    Raises UsageError for a user's rule that matches nothing, and if `ranks` does not divide the heads or a width.
    """

    modules: Sequence[nn.Module]
    rules: Sequence[Rule]
    ranks: int
    layers: list[Change] = field(default_factory=list)
    parameters: list[tuple[ModulePlace, str, Split | None]] = field(default_factory=list)
    crossings: list[tuple[nn.Module, list[Argument], bool]] = field(default_factory=list)
    integers: list[tuple[nn.Module, str, int]] = field(default_factory=list)
    configs: list[tuple[nn.Module, dict[str, int]]] = field(default_factory=list)
    _used: set[Rule] = field(default_factory=set)
    _covered: set[int] = field(default_factory=set)  # modules that layer rules match
    _doubts: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        places = list(places_in(self.modules))
        for place in places:
            self._find_layer(place)
        attentions = self._settle(places)
        columns = {id(change.place.around) for change in self.layers if change.rule.kind == "column"}
        attentions |= {
            id(each.place.around)
            for each in self.layers
            if each.rule.kind == "column" and each.rule not in DEFAULT_RULES  # a user's own, which may be heads, too
        }
        beside = {id(place.around) for place in places if id(place.module) in attentions}
        sums = {id(place.module) for place in places if self._is_sum(place)}
        changed = {id(change.layer) for change in self.layers}
        for place in places:
            own, outer = id(place.module), id(place.around)
            in_attention = own in attentions or outer in attentions
            self._find_integers(place, in_attention, own in sums or (own in columns and self._knows_all(place)))
            inside = in_attention or own in columns or outer in columns
            if own not in changed and not isinstance(place.module, SplitModule | TensorLayer):
                self._find_parameters(place, own in sums or in_attention, outer in beside, inside)
            self._find_crossing(place, own in attentions, own in sums)
        for change in self.layers:
            if change.rule.kind == "row":
                self._require(sizes_of(change.layer)[0], f"the number of inputs of {change.name}")
            for part in change.parts:
                self._require(part, f"the number of outputs of {change.name}")
        self._require_used(places)
        for name, reason in self._doubts.items():
            LOG.info("%s stays whole on every tensor rank: %s", name, reason)

    def _find_layer(self, place: ModulePlace) -> None:
        rule = self._match(place.site, _LAYERS, place.around)
        if rule is None:
            kind = first_match(self.rules, place.site, _LAYERS)
            if (
                kind is not None
                and kind.kind in ("column", "attention")
                and (is_linear(place.module) or is_conv1d(place.module))
            ):
                self._doubts[place.name] = (
                    f"the order of its outputs is not known for a {type(place.around).__name__}: add a "
                    "pipeflow.tensor.Rule for it"
                )
            return
        self._covered.add(id(place.module))
        fits = is_embedding(place.module) if rule.kind == "vocabulary" else is_linear(place.module)
        if rule.kind in ("column", "attention", "row"):
            fits = fits or is_conv1d(place.module)
        if place.factor not in _SPLIT_FACTOR.get(rule.kind, ("",)):
            return
        if not fits or rule.kind == "whole" or isinstance(place.module, TensorLayer):
            if rule not in DEFAULT_RULES and rule.kind != "whole" and next(place.module.children(), None) is None:
                raise UsageError(f"{rule} matches {place.name}, but it cannot split a {type(place.module).__name__}")
            return
        outputs = sizes_of(place.module)[1] if rule.kind in ("column", "attention") else 0
        parts = rule.sizes(place.name, outputs, place.around) if outputs else ()
        self.layers.append(Change(place, rule, parts))

    def _match(self, name: str, kinds: Sequence[Kind], around: nn.Module) -> Rule | None:
        rule = first_match(self.rules, name, kinds, around)
        if rule is not None:
            self._used.add(rule)
        return rule

    def _settle(self, places: Sequence[ModulePlace]) -> set[int]:
        """Leaves out layers that must stay whole, until no more are found. Returns the ids of the attentions that
        remain.
        """
        planned = Counter(id(change.place.around) for change in self.layers if change.rule.kind == "attention")
        while True:
            before = len(self.layers)
            self._keep_whole_together(places)
            attentions = self._keep_attentions(places, planned)
            self._keep_columns(places, attentions)
            if len(self.layers) == before:
                return attentions

    def _keep_whole_together(self, places: Sequence[ModulePlace]) -> None:
        """Leaves layers whole that share their weight with a layer that stays whole or is split in another way."""
        while True:
            ways: dict[int, set[int | None]] = defaultdict(set)
            by_layer = {id(change.layer): change for change in self.layers}
            for place in places:
                for name, parameter in place.module._parameters.items():
                    if name == "weight" and parameter is not None:
                        change = by_layer.get(id(place.module))
                        ways[id(parameter)].add(None if change is None else change.dimension)
            kept = [each for each in self.layers if len(ways.get(id(each.layer._parameters.get("weight")), ())) < 2]
            if len(kept) == len(self.layers):
                return
            self.layers = kept

    def _keep_attentions(self, places: Sequence[ModulePlace], planned: Mapping[int, int]) -> set[int]:
        by_owner: dict[int, list[Change]] = defaultdict(list)
        for change in self.layers:
            if change.rule.kind == "attention":
                by_owner[id(change.place.around)].append(change)
        for place in places:
            if (own := by_owner.get(id(place.module))) is not None:
                try:
                    if len(own) < planned[id(place.module)]:
                        raise Doubt("one of its layers shares a weight that stays whole")
                    AttentionLayers(place, own, self._kind, self.rules, self.ranks).settle()
                except Doubt as doubt:
                    if any(change.rule not in DEFAULT_RULES for change in own):
                        continue  # a user's own rule is trusted
                    del by_owner[id(place.module)]
                    self._leave(place, str(doubt))
        return set(by_owner)

    def _leave(self, place: ModulePlace, reason: str) -> None:
        """Leaves an attention and everything in it whole, since it may use weights of layers that it does not call."""
        inner = set(map(id, place.module.modules()))
        self._doubts[place.name] = reason
        self.layers = [each for each in self.layers if id(each.layer) not in inner]

    def _keep_columns(self, places: Sequence[ModulePlace], attentions: Collection[int]) -> None:
        """Leaves columns whole unless it is certain that layers after them take their outputs in parts."""
        outer = {id(place.module): place.around for place in places}
        taken, kept = widths_taken(self.layers, outer), []
        for change in self.layers:
            around = change.place.around
            reason = None
            if (
                change.rule.kind == "column"
                and change.rule in DEFAULT_RULES
                and id(outer[id(around)]) not in attentions
            ):
                widths = taken.get(id(around)) or taken.get(id(outer[id(around)])) or ()
                reason = reason_to_keep(change, widths, self._kind)
            if reason is None:
                kept.append(change)
            else:
                self._doubts[change.name] = reason
        self.layers = kept

    def _kind(self, place: ModulePlace, leaf: str) -> str | None:
        """The kind of the rule that covers a parameter, or None."""
        rule = rule_of_tensor(self.rules, place, leaf)
        if rule is not None:
            return rule.kind
        return "layer" if id(place.module) in self._covered else None

    def _knows_all(self, place: ModulePlace) -> bool:
        """Returns True if rules cover all parameters of a module."""
        name = f"{place.name}." if place.name else ""
        inner = [replace(each, name=f"{name}{each.name}") for each in places_in([place.module])]
        return all(self._kind(each, leaf) for each in inner for leaf in tensors_of(each.module))

    def _is_sum(self, place: ModulePlace) -> bool:
        rule = self._match(place.name, ("sum",), place.module)
        if rule is None or isinstance(place.module, Crossing):
            return False
        leaves = [(inner, leaf) for inner in places_in([place.module]) for leaf in tensors_of(inner.module)]
        for inner, leaf in leaves:
            part = rule_of_tensor(self.rules, place, leaf) if inner.module is place.module else None
            if part is None or part.kind != "parameter":
                if leaves and rule not in DEFAULT_RULES:
                    raise UsageError(f"{rule} matches {place.name}, but no rule splits its {leaf}")
                return False
        return bool(leaves)

    def _find_integers(self, place: ModulePlace, in_attention: bool, is_around: bool) -> None:
        for name, value in integers_of(place.module).items():
            rule = self._match(place.full(name), ("attribute", "groups"), place.module)
            if rule is None or rule.pattern.startswith("config"):
                continue
            is_of_heads = "head" in name or rule.kind == "groups" or rule.shared
            if rule in DEFAULT_RULES and not (in_attention or (is_around and not is_of_heads)):
                continue
            self.integers.append((place.module, name, self._divided(place, place.full(name), value, rule)))
        found = {}
        for name in read_of_config(place.module):
            full = place.full(f"config.{name}")
            rule = config_rule(self.rules, full, place.module)
            if rule is not None and (in_attention or rule not in DEFAULT_RULES):
                self._used.add(rule)
                found[name] = self._divided(place, full, getattr(place.module.config, name), rule)
        if found:
            self.configs.append((place.module, found))

    def _divided(self, place: ModulePlace, full: str, value: int, rule: Rule) -> int:
        """The new value of an integer."""
        owners = (place.module, place.around)
        shared = [change.shared for change in self.layers if change.place.around in owners]
        sharing = max([1, *(ranks for each in shared for ranks in each.values())])
        if rule.kind == "groups":
            return value // sharing
        if rule.shared:
            value *= sharing
        self._require(value, full)
        return value // self.ranks

    def _find_parameters(self, place: ModulePlace, is_split: bool, is_beside: bool, is_inside: bool) -> None:
        for leaf, tensor in tensors_of(place.module).items():
            rule = rule_of_tensor(self.rules, place, leaf)
            if rule is None:
                continue
            self._used.add(rule)
            is_used = is_split or (is_beside and bool(rule.of))  # beside an attention only in a class that is known
            if rule in DEFAULT_RULES and not (is_inside if rule.kind == "partial" else is_used):
                continue
            if not place.name:
                raise UsageError(f"{rule} matches {leaf} of the outermost module: move it into a submodule")
            if leaf in place.module._parameters:
                self.parameters.append((place, leaf, self._split(place, leaf, tensor, rule)))

    def _split(self, place: ModulePlace, leaf: str, tensor: Tensor, rule: Rule) -> Split | None:
        if rule.kind == "partial":
            return None
        if not 0 <= rule.dim < tensor.dim():
            raise UsageError(f"{rule} matches {place.full(leaf)}, whose shape is {tuple(tensor.shape)}")
        size = tensor.shape[rule.dim]
        parts = rule.sizes(place.full(leaf), size, place.module)
        for part in parts:
            self._require(part, f"dimension {rule.dim} of {place.full(leaf)}")
        return Split(rule.dim, size, parts if len(parts) > 1 else ())

    def _find_crossing(self, place: ModulePlace, is_attention: bool, is_sum: bool) -> None:
        arguments = []
        names: Iterable[Any] = ()
        if is_attention or any(rule.kind == "argument" and rule not in DEFAULT_RULES for rule in self.rules):
            names = inspect.signature(type(place.module).forward).parameters
        for name in names:
            rule = self._match(place.full(name), ("argument",), place.module)
            if rule is not None and (is_attention or rule not in DEFAULT_RULES):
                length = vars(place.module)[rule.parts] if isinstance(rule.parts, str) else None
                arguments.append(Argument(name, rule.dim, length))
        if (arguments or is_sum) and not isinstance(place.module, Crossing):
            self.crossings.append((place.module, arguments, is_sum))

    def _require(self, number: int, what: str) -> None:
        """Raises UsageError unless the tensor size divides `number`."""
        if number % self.ranks:
            sizes = ", ".join(str(size) for size in range(1, number + 1) if number % size == 0)
            raise UsageError(
                f"{what} is {number}, which {self.ranks} tensor ranks cannot share: choose a tensor size of {sizes}"
            )

    def _require_used(self, places: Sequence[ModulePlace]) -> None:
        for rule in self.rules:
            if rule not in self._used and rule not in DEFAULT_RULES:
                raise UsageError(
                    f"{rule} matches nothing in the module: a pattern is a regular expression for the end of a full "
                    f"name, such as {places[-1].name!r}"
                )
