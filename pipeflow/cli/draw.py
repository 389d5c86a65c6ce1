"""`pipeflow draw`: a timeline in the terminal, or in files."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from pipeflow.cli.files import STANDARD_OUTPUT
from pipeflow.cli.options import cost_options, schedule_argument, schedule_options, unit_options
from pipeflow.cli.outputs import FORMATS, add_outputs, files_named, show, write_drawings
from pipeflow.cli.request import Request
from pipeflow.cli.sources import sound_source
from pipeflow.core.errors import UsageError

if TYPE_CHECKING:
    from pipeflow.cli.options import Commands


def add_to(commands: Commands) -> None:
    """Adds the command and its options."""
    parents = [schedule_argument(), schedule_options(), cost_options(), unit_options()]
    command = commands.add_parser("draw", help="draw the timeline of a schedule, or a measured one", parents=parents)
    add_outputs(command, *FORMATS)
    help_ = "list the actions that make up the makespan, and mark them in files"
    command.add_argument("--critical-path", action="store_true", help=help_)
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Draws the timeline in the terminal, or writes it into the files that are named."""
    paths = files_named(arguments, *FORMATS)
    if arguments.critical_path and STANDARD_OUTPUT in paths.values():
        raise UsageError("standard output can take one output, not a file and --critical-path")
    request = Request.of(arguments)
    timeline = sound_source(arguments.schedule, request).timeline(request.costs)
    unit, factor = arguments.unit, arguments.factor
    if paths:
        write_drawings(paths, timeline, unit=unit, factor=factor, critical_path=arguments.critical_path)
    else:
        from pipeflow.draw import Gantt

        show(Gantt(timeline, unit, factor, memory=arguments.memory))
    if arguments.critical_path:
        from pipeflow.draw import CriticalPath

        show(*[] if paths else [""], CriticalPath(timeline, unit, factor))
    return 0
