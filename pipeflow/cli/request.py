"""Request: the options of a command that are about schedules."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass, replace
from typing import final

from pipeflow.cli.costs import Costs
from pipeflow.cli.options import flag
from pipeflow.core.errors import UsageError
from pipeflow.schedules import SCHEDULES, options_of
from pipeflow.schedules.memory import STAGE_OPTIONS
from pipeflow.schedules.options import family_options


@final
@dataclass(frozen=True, slots=True)
class Request:
    """The options that are about schedules. None: not given.

    Attributes:
        costs: the given costs.
        ranks, microbatches: the size of a named schedule.
        options: the options of the schedule, as (name, value).
        placement: the name of a placement for a CSV file.
        forward_only: whether to leave out backwards.
        memory: the stages of each option that saves memory, as (option of make_schedule, stages); True: all.
    """

    costs: Costs
    ranks: int | None = None
    microbatches: int | None = None
    options: tuple[tuple[str, object], ...] = ()
    placement: str | None = None
    forward_only: bool = False
    memory: tuple[tuple[str, bool | tuple[int, ...]], ...] = ()

    @classmethod
    def of(cls, arguments: argparse.Namespace) -> Request:
        """The request from the arguments of a command with schedule_options and cost_options."""
        given = [(name, getattr(arguments, name)) for name in family_options()]
        return cls(
            Costs.of(arguments),
            arguments.ranks,
            arguments.microbatches,
            tuple((name, value) for name, value in given if value is not None),
            arguments.placement,
            arguments.forward_only,
            tuple(
                (name.removesuffix("_stages"), stages) for name in STAGE_OPTIONS if (stages := getattr(arguments, name))
            ),
        )

    def among(self, names: list[str]) -> dict[str, Request]:
        """Per name, the part of the request that applies to it: sizes to named schedules, each with the options that it
        has, and the placement to files. Raises UsageError for an option that applies to none of them.
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
        """The request without options that the schedule `name` does not have."""
        known = options_of(name) if name in SCHEDULES else ()
        return replace(self, options=tuple((option, value) for option, value in self.options if option in known))


def is_file(name: str) -> bool:
    """Whether an argument is a file: it looks like a path, or there is a file with this name."""
    return name not in SCHEDULES and ("." in name or os.path.dirname(name) != "" or os.path.isfile(name))
