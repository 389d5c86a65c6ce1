"""Request: what the options of a command ask of schedules."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass, replace
from typing import final

from pipeflow.cli.costs import Costs
from pipeflow.cli.options import family_options, flag
from pipeflow.core.errors import UsageError
from pipeflow.schedules import SCHEDULES, options_of


@final
@dataclass(frozen=True, slots=True)
class Request:
    """What the options say about schedules; None is what they leave open."""

    costs: Costs
    ranks: int | None = None
    microbatches: int | None = None
    options: tuple[tuple[str, float], ...] = ()
    placement: str | None = None
    forward_only: bool = False

    @classmethod
    def of(cls, arguments: argparse.Namespace) -> Request:
        """From the arguments of a command with schedule_options and cost_options."""
        given = [(name, getattr(arguments, name)) for name in family_options()]
        return cls(
            Costs.of(arguments),
            arguments.ranks,
            arguments.microbatches,
            tuple((name, value) for name, value in given if value is not None),
            arguments.placement,
            arguments.forward_only,
        )

    def among(self, names: list[str]) -> dict[str, Request]:
        """Per name of several, what of this is for it: sizes for the named schedules, each with the options that it
        has, the placement for files. Raises UsageError for what is for none of them.
        """
        families = [name for name in names if not is_file(name)]
        files = [name for name in names if is_file(name)]
        known = [name for name in families if name in SCHEDULES]
        for option, _ in self.options:
            if known and not any(option in options_of(name) for name in known):
                raise UsageError(f"none of {', '.join(known)} takes {flag(option)}")
        sized = replace(self, placement=None) if files else self
        placed = replace(self, ranks=None, microbatches=None, options=()) if families else self
        return {name: placed if name in files else sized.fitting(name) for name in names}

    def fitting(self, name: str) -> Request:
        """Without the options that the schedule `name` does not have."""
        known = options_of(name) if name in SCHEDULES else ()
        return replace(self, options=tuple((option, value) for option, value in self.options if option in known))


def is_file(name: str) -> bool:
    """Whether an argument means a file: because it looks like one, or because there is one."""
    return name not in SCHEDULES and ("." in name or os.path.dirname(name) != "" or os.path.isfile(name))
