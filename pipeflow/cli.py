"""The command `pipeflow`: list, draw, simulate, verify and export schedules. Whatever draws or searches is
imported where it is used, so that the command starts fast; torch is never needed.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from pipeflow import __version__
from pipeflow.analysis.lower import lower
from pipeflow.analysis.simulate import simulate
from pipeflow.analysis.verify import Violation, verify, verify_programs
from pipeflow.core.cost import CostModel
from pipeflow.core.errors import UsageError
from pipeflow.core.placement import Placement
from pipeflow.core.schedule import Schedule
from pipeflow.core.timeline import Timeline
from pipeflow.schedules import SCHEDULES, make_schedule, options_of

OPTIONS = ("chunks",)  # those of the schedules' own options that the command takes
PLACEMENTS = {
    "linear": Placement.linear,
    "looped": None,  # over as many chunks as the file has
    "vee": Placement.vee,
    "bidirectional": Placement.bidirectional,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status: 0, 1 for an unsound schedule, 2 for arguments that cannot
    work, 141 when the reader of the output went away.
    """
    try:
        arguments = _parser().parse_args(argv)
        status: int = arguments.run(arguments)
        sys.stdout.flush()
    except UsageError as error:
        print(f"pipeflow: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left in the buffer goes nowhere
        return 141
    return status


def _list(_: argparse.Namespace) -> int:
    options = {name: " ".join(f"--{option}" for option in options_of(name) if option in OPTIONS) for name in SCHEDULES}
    widths = max(map(len, options)), max(map(len, options.values()))
    for name, generator in SCHEDULES.items():
        summary = (generator.__doc__ or "").partition("\n")[0]
        print(f"{name:{widths[0]}}  {options[name]:{widths[1]}}  {summary}".rstrip())
    return 0


def _draw(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from pipeflow.draw import Gantt

    console = Console()
    with console.capture() as capture:
        console.print(Gantt(_timeline(arguments)))
    sys.stdout.writelines(capture.get().splitlines(keepends=True))
    return 0


def _simulate(arguments: argparse.Namespace) -> int:
    timeline = _timeline(arguments)
    measures = {
        "makespan": timeline.makespan,
        "span": timeline.span,
        "bubble_ratio": timeline.bubble_ratio,
        "peak_activations": timeline.peak_activations,
    }
    if arguments.json:
        import json

        print(json.dumps(measures))
        return 0
    print(f"makespan          {timeline.makespan:.6g}")
    print(f"span              {timeline.span:.6g}")
    print(f"bubble ratio      {timeline.bubble_ratio:.4f}")
    print(f"peak activations  {' '.join(f'{peak:.4g}' for peak in timeline.peak_activations)}")
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    schedule = _schedule(arguments)
    violations = _violations(schedule)
    for violation in violations:
        print(violation)
    if violations:
        return 1
    placement = schedule.placement
    print(
        f"{schedule.name} is sound: {placement.num_ranks} ranks, {placement.num_stages} stages, "
        f"{schedule.num_microbatches} microbatches"
    )
    return 0


def _export(arguments: argparse.Namespace) -> int:
    text = _schedule(arguments).to_csv()
    if arguments.csv == "-":
        sys.stdout.writelines(text.splitlines(keepends=True))
        return 0
    try:
        with open(arguments.csv, "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise UsageError(f"{arguments.csv}: {error.strerror}") from error
    return 0


def _timeline(arguments: argparse.Namespace) -> Timeline:
    schedule = _schedule(arguments)
    if arguments.schedule not in SCHEDULES and (violations := _violations(schedule)):
        raise UsageError(
            f"{arguments.schedule} has {len(violations)} violations, the first: {violations[0]}; see pipeflow verify"
        )
    cost = CostModel.even(
        schedule.placement,
        forward=arguments.forward,
        backward_input=arguments.backward_input,
        backward_weight=arguments.backward_weight,
        transfer=arguments.transfer,
    )
    return simulate(schedule, cost)


def _violations(schedule: Schedule) -> list[Violation]:
    return verify(schedule) or verify_programs(lower(schedule))


def _schedule(arguments: argparse.Namespace) -> Schedule:
    """The schedule that the arguments name, or the file that they name holds."""
    name: str = arguments.schedule
    if name not in SCHEDULES and (name.endswith(".csv") or os.path.isfile(name)):
        schedule = _from_file(arguments)
    else:
        schedule = _from_name(arguments)
    return schedule.forward_only() if arguments.forward_only else schedule


def _from_name(arguments: argparse.Namespace) -> Schedule:
    if arguments.placement is not None:
        raise UsageError(f"--placement is for CSV files; schedule {arguments.schedule!r} has its own")
    options = {} if arguments.chunks is None else {"chunks": arguments.chunks}
    return make_schedule(
        arguments.schedule,
        ranks=4 if arguments.ranks is None else arguments.ranks,
        microbatches=8 if arguments.microbatches is None else arguments.microbatches,
        **options,
    )


def _from_file(arguments: argparse.Namespace) -> Schedule:
    if arguments.ranks is not None or arguments.chunks is not None:
        raise UsageError(f"--ranks and --chunks are for named schedules; {arguments.schedule} has its own")
    try:
        with open(arguments.schedule, encoding="utf-8-sig") as file:
            text = file.read()
        make_placement = PLACEMENTS[arguments.placement or "looped"]
        placement = make_placement(len(text.strip("\n").split("\n"))) if make_placement else None
        return Schedule.from_csv(text, placement, arguments.microbatches, name=arguments.schedule)
    except OSError as error:
        raise UsageError(f"{arguments.schedule}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{arguments.schedule}: not a text file") from error
    except UsageError as error:
        raise UsageError(f"{arguments.schedule}: {error}") from error


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see {self.prog} --help)")


def _parser() -> _Parser:
    parser = _Parser(prog="pipeflow", description="Pipeline schedules: list, draw, simulate, verify, export.")
    parser.add_argument("--version", action="version", version=f"pipeflow {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    schedule, cost = _schedule_options(), _cost_options()

    command = commands.add_parser("list", help="the schedules there are, with their options")
    command.set_defaults(run=_list)
    command = commands.add_parser("draw", help="the timeline of a schedule", parents=[schedule, cost])
    command.set_defaults(run=_draw)
    command = commands.add_parser("simulate", help="the measures of a timeline", parents=[schedule, cost])
    command.add_argument("--json", action="store_true", help="for programs")
    command.set_defaults(run=_simulate)
    command = commands.add_parser("verify", help="prove a schedule sound, or say all that is wrong", parents=[schedule])
    command.set_defaults(run=_verify)
    command = commands.add_parser("export", help="write a schedule as a table", parents=[schedule])
    command.add_argument("--csv", required=True, metavar="FILE", help="one line a rank; - is standard output")
    command.set_defaults(run=_export)
    return parser


def _schedule_options() -> _Parser:
    parser = _Parser(add_help=False)
    parser.add_argument("schedule", metavar="SCHEDULE", help="a name from `pipeflow list`, or a CSV file")
    parser.add_argument("--ranks", type=int, metavar="N", help="4 unless given")
    parser.add_argument("--microbatches", type=int, metavar="N", help="8 unless given, or as many as the file has")
    parser.add_argument("--chunks", type=int, metavar="N", help="stages a rank, for schedules that have several")
    parser.add_argument("--placement", choices=PLACEMENTS, help="of the stages of a CSV file: looped unless given")
    parser.add_argument("--forward-only", action="store_true", help="without the backwards, as in evaluation")
    return parser


def _cost_options() -> _Parser:
    parser = _Parser(add_help=False)
    group = parser.add_argument_group("costs", "in any unit; of one microbatch on one rank's whole share of the model")
    group.add_argument("--forward", type=float, default=1.0, metavar="T", help="1 unless given")
    group.add_argument("--backward-input", type=float, default=1.0, metavar="T", help="1 unless given")
    group.add_argument("--backward-weight", type=float, default=1.0, metavar="T", help="1 unless given")
    group.add_argument("--transfer", type=float, default=0.0, metavar="T", help="between two ranks: 0 unless given")
    return parser
