"""`pipeflow draw`: a timeline in the terminal, or as files."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from pipeflow.cli.files import STANDARD_OUTPUT, write
from pipeflow.cli.options import cost_options, flag, schedule_argument, schedule_options, unit_options
from pipeflow.cli.plans import Asked, sound_plan
from pipeflow.core.errors import UsageError
from pipeflow.core.timeline import Timeline

if TYPE_CHECKING:
    from rich.console import RenderableType

    from pipeflow.cli.options import Commands

FORMATS = {
    "svg": "a picture that scales",
    "html": "a page that shows each action, its cause and the memory",
    "perfetto": "a trace for ui.perfetto.dev, a unit of time as a second",
}


def add_to(commands: Commands) -> None:
    """The command and its options."""
    parents = [schedule_argument(), schedule_options(), cost_options(), unit_options()]
    command = commands.add_parser("draw", help="the timeline of a schedule, or a measured one", parents=parents)
    group = command.add_argument_group("output", "in the terminal unless files are named; - is standard output")
    for name, what in FORMATS.items():
        group.add_argument(flag(name), metavar="FILE", help=what)
    group.add_argument("--critical-path", action="store_true", help="also list what the makespan consists of")
    group.add_argument("--no-memory", dest="memory", action="store_false", help="without the lines of what is kept")
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Draws what was asked for."""
    paths = {name: getattr(arguments, name) for name in FORMATS if getattr(arguments, name) is not None}
    _require_apart([*paths.values(), *[STANDARD_OUTPUT] * arguments.critical_path])
    asked = Asked.of(arguments)
    timeline = sound_plan(arguments.schedule, asked).timeline(asked.costs)
    if paths:
        write({path: _written(name, timeline, arguments) for name, path in paths.items()})
    else:
        from pipeflow.draw import Gantt

        show(Gantt(timeline, arguments.unit, arguments.factor, memory=arguments.memory))
    if arguments.critical_path:
        from pipeflow.draw import CriticalPath

        show(*[] if paths else [""], CriticalPath(timeline, arguments.unit, arguments.factor))
    return 0


def show(*renderables: RenderableType) -> None:
    """Prints to standard output, with the colours that it has, a line at a time."""
    from rich.console import Console

    console = Console(highlight=False)
    with console.capture() as capture:
        for renderable in renderables:
            console.print(renderable, markup=False, crop=False)
    sys.stdout.writelines(capture.get().splitlines(keepends=True))


def _written(name: str, timeline: Timeline, arguments: argparse.Namespace) -> str:
    from pipeflow import draw

    times = {} if name == "perfetto" else {"unit": arguments.unit, "factor": arguments.factor}
    text: str = getattr(draw, name)(timeline, **times)
    return text


def _require_apart(paths: list[str]) -> None:
    for path in paths:
        if paths.count(path) > 1:
            what = "standard output" if path == STANDARD_OUTPUT else path
            raise UsageError(f"{what} can take one output, not {paths.count(path)}")
