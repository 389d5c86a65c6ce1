"""`pipeflow verify`: proves that a schedule is sound, or lists everything that is wrong."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import TYPE_CHECKING

from pipeflow.cli.options import cost_options, schedule_argument, schedule_options
from pipeflow.cli.request import Request
from pipeflow.cli.sources import source, violations_of
from pipeflow.core.text import printable
from pipeflow.schedules import SCHEDULES, options_of
from pipeflow.schedules.options import family_options

if TYPE_CHECKING:
    from pipeflow.cli.options import Commands


def add_to(commands: Commands) -> None:
    """Adds the command and its options."""
    parents = [schedule_argument(), schedule_options(), cost_options()]  # costs: some schedules are made for them
    command = commands.add_parser("verify", help="check a schedule and list everything that is wrong", parents=parents)
    if "memory_cap" not in family_options():
        help_ = "also check that no rank keeps more activations than this, in microbatches"
        command.add_argument("--memory-cap", type=float, metavar="X", help=help_)
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Prints that the schedule is sound, or one line per violation."""
    name: str = arguments.schedule
    request = Request.of(arguments)
    if name not in SCHEDULES or "memory_cap" not in options_of(name):
        request = replace(request, options=tuple(each for each in request.options if each[0] != "memory_cap"))
    schedule = source(name, request).schedule
    violations = violations_of(schedule, arguments.memory_cap, request.costs)
    for violation in violations:
        print(printable(str(violation)))
    if violations:
        return 1
    placement = schedule.placement
    print(
        f"{printable(schedule.name)} is sound: {placement.num_ranks} ranks, {placement.num_stages} stages, "
        f"{schedule.num_microbatches} microbatches"
    )
    return 0
