"""Rules: say by name which modules and parameters of a model are split over the tensor ranks, and how. Must not
contain: the default rules, which are in `tensor/table.py`, and the splitting itself.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

from torch import nn

from pipeflow.core.errors import UsageError
from pipeflow.tensor.attributes import attribute_of

Kind = Literal[
    "column",
    "attention",
    "row",
    "vocabulary",
    "head",
    "parameter",
    "partial",
    "sum",
    "argument",
    "attribute",
    "groups",
    "whole",
]
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True)
class Rule:
    """One line of the table of rules. The first rule that matches a name is used.

    Attributes:
        kind: how a module, parameter or attribute with a matching name is treated:
            "column": each rank has some of the outputs of a linear layer.
            "attention": like "column". The outputs are attention heads, of query, key and value or of all three in one.
            "row": each rank has some of the inputs of a linear layer. Outputs are summed before the bias is added.
            "vocabulary": each rank has some of the rows of an embedding.
            "head": each rank has some of the outputs of a linear layer. All outputs are gathered.
            "parameter": each rank has a part of a parameter along `dim`, such as a parameter with an entry per head.
            "partial": a whole parameter that is used with split tensors only, so its gradient is summed over the ranks.
            "sum": a module that computes with split parameters. Its output is summed over the ranks.
            "argument": each rank gets its part, along `dim`, of an argument of a module's forward.
            "attribute": an integer, such as a number of heads, that is divided by the number of ranks.
            "groups": an integer: how many heads of the query share one head of key and value.
            "whole": unchanged, even if a later rule matches.
        pattern: regular expression for the end of the name, starting at a dot or at the beginning. "parameter" matches
            names of parameters; "partial" those of parameters or modules; "attribute", "groups" and "argument" those of
            attributes and arguments, such as `attn.num_heads`; all others match names of modules. An "attribute" whose
            pattern begins with `config` is an attribute of the module's `config`; the module then gets its own copy of
            the config.
        parts: parts of a packed tensor, such as query, key and value, each of which is split: their number if they are
            equal, or their relative sizes. Names stand for integer attributes of the surrounding module: a single name
            for the size of each part, several for relative sizes.
        dim: dimension that is split, for "parameter" and "argument".
        together: for "attention", how many parts lie together. It is 3 if query, key and value of one head come one
            after the other, and then those of the next head. Or the name of an attribute that counts such groups.
        shared: for "attention", the indices of parts whose heads several ranks share if there are fewer heads than
            ranks: those of key and value. (0,) for a layer that has only such heads, and for an "attribute" that counts
            them.
        of: regular expression for the name of the class that surrounds the layer, or has the parameter, attribute or
            argument; the rule applies to such modules only.
        where: attributes of that module with their required values; the rule applies only if all of them match.

    Raises UsageError for an unknown kind, and for a pattern that is not a regular expression.
    """

    kind: Kind
    pattern: str
    parts: int | str | tuple[int | str, ...] = 1
    dim: int = 0
    together: int | str = 1
    shared: tuple[int, ...] = ()
    of: str = ""
    where: tuple[tuple[str, object], ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UsageError(f"there is no kind of rule {self.kind!r}: choose one of {', '.join(KINDS)}")
        try:
            self._expression, self._classes  # noqa: B018  # compiles both
        except re.error as error:
            raise UsageError(f"the pattern of {self} is not a regular expression: {error}") from error

    @cached_property
    def _expression(self) -> re.Pattern[str]:
        return re.compile(rf"(?:^|\.)(?:{self.pattern})$")

    @cached_property
    def _classes(self) -> re.Pattern[str]:
        return re.compile(self.of)

    def matches(self, name: str, around: nn.Module | None) -> bool:
        """Returns True if the full `name` matches the pattern and the rule applies to the module `around`; None stands
        for any module.
        """
        return self._expression.search(name) is not None and (around is None or self.suits(around))

    def suits(self, module: nn.Module) -> bool:
        """Returns True if the rule applies to the module."""
        if self.of and self._classes.fullmatch(type(module).__name__) is None:
            return False
        if isinstance(self.parts, str) and not isinstance(vars(module).get(self.parts), int):
            return False
        return all(attribute_of(module, name) == value for name, value in self.where)

    def sizes(self, name: str, size: int, around: nn.Module) -> tuple[int, ...]:
        """The sizes of the parts of a tensor of `size` entries. Raises UsageError if they are not integers."""
        shares = self._shares(size, around)
        each = vars(around)[self.parts] if isinstance(self.parts, str) else 1
        if not shares or min(shares) < 1 or size % sum(shares) or size % each:
            raise UsageError(f"{name} has {size} outputs, which cannot be divided into the parts of {self}")
        return tuple(size // sum(shares) * share for share in shares)

    def _shares(self, size: int, around: nn.Module) -> tuple[int, ...]:
        if isinstance(self.parts, int):
            return (1,) * self.parts
        if isinstance(self.parts, str):
            return (1,) * (size // int(vars(around)[self.parts]))
        return tuple(share if isinstance(share, int) else _count(around, share, self) for share in self.parts)


def _count(around: nn.Module, name: str, rule: Rule) -> int:
    """An integer attribute of a module or of its config. Raises UsageError if neither has it."""
    for holder in (around, attribute_of(around, "config")):
        if isinstance(found := attribute_of(holder, name), int):
            return found
    raise UsageError(f"{type(around).__name__} has no integer attribute {name!r}, which {rule} names")


def config_rule(rules: Sequence[Rule], name: str, around: nn.Module) -> Rule | None:
    """The rule for an attribute of a module's config; `name` is the full name of the module, `config.` and the
    attribute.
    """
    of_configs = [rule for rule in rules if rule.pattern.startswith("config")]
    return first_match(of_configs, name, ("attribute",), around)


def first_match(
    rules: Sequence[Rule], name: str, kinds: Sequence[Kind], around: nn.Module | None = None
) -> Rule | None:
    """The first rule of the given kinds that matches `name` in the module `around`, or None."""
    return next((rule for rule in rules if rule.kind in kinds and rule.matches(name, around)), None)
