"""Rules: which modules and parameters of any model are split over the tensor ranks, and how, by their names. What a
rule is, and how it is read; the rules that everyone gets are in `tensor/table.py`, and nothing is split here.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

from torch import nn

from pipeflow.core.errors import UsageError

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
    """One line of the table. Of the rules that match a name the first one counts.

    Attributes:
        kind: what is done with what has such a name:
            "column": each rank has some of the outputs of a linear layer;
            "attention": likewise, and the outputs are attention heads: query, key and value, or all three in one;
            "row": each rank has some of its inputs, and the outputs are summed before the whole bias is added;
            "vocabulary": each rank has some of the rows of an embedding;
            "head": each rank has some of the outputs of a linear layer, and all are gathered;
            "parameter": each rank has a part of a parameter along `dim`, such as one that has an entry per head;
            "partial": the parameter is whole, and used with split tensors alone, so its gradient is summed;
            "sum": the module computes with split parameters, and what it returns is summed over the ranks;
            "argument": each rank gets its part, along `dim`, of an argument of a module's forward;
            "attribute": an integer, such as a number of heads, is divided by the number of ranks;
            "groups": an integer, how many heads of the query share one of key and value;
            "whole": nothing, also where a later rule would match.
        pattern: a regular expression for the end of the name, from a dot or the beginning on. "parameter" takes the
            names of parameters, "partial" those of parameters or modules, "attribute", "groups" and "argument" those of
            attributes and arguments, as in `attn.num_heads`, all others names of modules. An "attribute" whose pattern
            begins with `config` is one of the module's `config`, of which the module then has a copy of its own.
        parts: what is split is made of several things, such as query, key and value, of each of which every rank has
            its part: their number where they are equal, or their sizes relative to each other. Names stand for integer
            attributes of the module around: one for the size of each part, several for relative sizes.
        dim: of "parameter" and "argument".
        together: of an "attention", what lies together: 3 where query, key and value of one head come one after the
            other, then those of the next; the name of an attribute that counts such groups.
        shared: of an "attention", the parts whose heads several ranks may share where there are fewer than ranks: those
            of key and value. (0,) for a layer that has no others, and for an "attribute" that counts these.
        of: a regular expression for the name of the class around the layer, or that has the parameter, attribute or
            argument: the rule is for such modules alone.
        where: attributes that this module has, with their values; otherwise the rule is not for it.

    Raises UsageError for a kind that there is not, and a pattern that is no regular expression.
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
            self._expression, self._classes  # noqa: B018  # compiles them
        except re.error as error:
            raise UsageError(f"the pattern of {self} is no regular expression: {error}") from error

    @cached_property
    def _expression(self) -> re.Pattern[str]:
        return re.compile(rf"(?:^|\.)(?:{self.pattern})$")

    @cached_property
    def _classes(self) -> re.Pattern[str]:
        return re.compile(self.of)

    def matches(self, name: str, around: nn.Module | None) -> bool:
        """Whether a full name ends as the pattern says, and lies in a module as the rule wants it; None: in any."""
        return self._expression.search(name) is not None and (around is None or self.suits(around))

    def suits(self, module: nn.Module) -> bool:
        """Whether a module is one that the rule is for."""
        if self.of and self._classes.fullmatch(type(module).__name__) is None:
            return False
        if isinstance(self.parts, str) and not isinstance(vars(module).get(self.parts), int):
            return False
        return all(getattr(module, name, None) == value for name, value in self.where)

    def sizes(self, name: str, size: int, around: nn.Module) -> tuple[int, ...]:
        """Those of the parts of what is so long. Raises UsageError where they do not come out even."""
        shares = self._shares(size, around)
        each = vars(around)[self.parts] if isinstance(self.parts, str) else 1
        if not shares or min(shares) < 1 or size % sum(shares) or size % each:
            raise UsageError(f"{name} has {size} outputs, which are not made of the parts of {self}")
        return tuple(size // sum(shares) * share for share in shares)

    def _shares(self, size: int, around: nn.Module) -> tuple[int, ...]:
        if isinstance(self.parts, int):
            return (1,) * self.parts
        if isinstance(self.parts, str):
            return (1,) * (size // int(vars(around)[self.parts]))
        return tuple(share if isinstance(share, int) else _count(around, share, self) for share in self.parts)


def _count(around: nn.Module, name: str, rule: Rule) -> int:
    """An integer that a module, or its config, has. Raises UsageError where neither does."""
    for holder in (around, getattr(around, "config", None)):
        if isinstance(found := getattr(holder, name, None), int):
            return found
    raise UsageError(f"{type(around).__name__} has no integer attribute {name!r}, of which {rule} speaks")


def config_rule(rules: Sequence[Rule], name: str, around: nn.Module) -> Rule | None:
    """The rule for an attribute of a module's config, `name` being that of the module and `config.` and its own."""
    of_configs = [rule for rule in rules if rule.pattern.startswith("config")]
    return first_match(of_configs, name, ("attribute",), around)


def first_match(
    rules: Sequence[Rule], name: str, kinds: Sequence[Kind], around: nn.Module | None = None
) -> Rule | None:
    """The rule that counts for a name, of those of certain kinds, in the module `around`."""
    return next((rule for rule in rules if rule.kind in kinds and rule.matches(name, around)), None)
