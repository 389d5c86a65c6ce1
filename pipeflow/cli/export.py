"""`pipeflow export`: a schedule as a CSV table."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from pipeflow.analysis.lowered_table import lowered_csv
from pipeflow.cli.files import write
from pipeflow.cli.options import cost_options, schedule_argument, schedule_options
from pipeflow.cli.request import Request
from pipeflow.cli.sources import source

if TYPE_CHECKING:
    from pipeflow.cli.options import Commands


def add_to(commands: Commands) -> None:
    """Adds the command and its options."""
    parents = [schedule_argument(), schedule_options(), cost_options()]  # costs: some schedules are made for them
    command = commands.add_parser("export", help="write a schedule as a CSV table", parents=parents)
    command.add_argument(
        "--csv", required=True, metavar="FILE", help="file to write, one line per rank (-: standard output)"
    )
    help_ = "write sends and receives too, as torch.distributed.pipelining loads them with format compute_comms"
    command.add_argument("--lowered", action="store_true", help=help_)
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Writes the schedule as CSV, with one line per rank."""
    schedule = source(arguments.schedule, Request.of(arguments)).schedule
    write({arguments.csv: lowered_csv(schedule) if arguments.lowered else schedule.to_csv()})
    return 0
