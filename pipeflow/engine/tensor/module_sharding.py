"""Sharding of any module: finds and checks what the rules say, then changes the layers in place. Must not contain: the
computations of layers.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from pipeflow.core.errors import UsageError
from pipeflow.engine.parallel.sharding import splits_of
from pipeflow.engine.parallel.transport.protocol import Group
from pipeflow.engine.tensor.converted import become_crossing, become_embedding, become_linear, become_told
from pipeflow.engine.tensor.division import cut
from pipeflow.engine.tensor.layer import group_of
from pipeflow.engine.tensor.rule_matches import RuleMatches
from pipeflow.engine.tensor.rules import DEFAULT_RULES, Rule
from pipeflow.engine.tensor.stepping import watch

LOG = logging.getLogger("pipeflow")
_KEY = "pipeflow: known before"


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
    parameter. Nothing is then changed.
    """
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
