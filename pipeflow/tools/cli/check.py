"""`pipeflow check`: two recorded runs of a training job compared: the first wrong value, and why."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from shlex import split
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from pipeflow.core.errors import UsageError
from pipeflow.tools.cli.options import Commands, values_of
from pipeflow.tools.cli.outputs import doing, show, wrapped, write

if TYPE_CHECKING:
    from pipeflow.checking.findings import Result

EXAMPLES = """\
examples:
  pipeflow check plain parallel
  pipeflow check plain parallel --json
  pipeflow check train.py --ranks 4 --tensor 2
  pipeflow check train.py --ranks 2 --schedule zb-v -- --layers 2
  pipeflow check train.py --ranks 4 --plain "--tensor 1" -- --tensor 2

exit status: 0 alike, 1 different, 2 the runs cannot be compared
"""


def add_check(commands: Commands) -> None:
    """Adds the command and its options."""
    command = commands.add_parser(
        "check",
        help="find the first wrong value of a parallel run, of any engine, and why it is wrong",
        epilog=EXAMPLES,
    )
    add = command.add_argument
    which = "folders of pipeflow.checking.record: the plain run, and the one to check; or a script, arguments after --"
    add("what", nargs="+", metavar="RECORDING", help=which)
    add("--tolerance", type=float, metavar="X", help="relative difference to allow (default: what rounding explains)")
    add("--exact", metavar="RECORDING", help="the plain run in a finer dtype, to measure what rounding explains")
    add("--json", action="store_true", help="print JSON")
    add("--html", metavar="FILE", help="write a page with the model as a tree")
    group = command.add_argument_group("scripts", "both runs are made, of any engine")
    group.add_argument("--ranks", type=int, metavar="N", help="ranks of the run to check")
    group.add_argument("--tensor", type=int, metavar="N", help="tensor ranks of pipeflow (default: as the script says)")
    group.add_argument("--schedule", metavar="NAME", help="schedule of pipeflow (default: as the script says)")
    group.add_argument(
        "--plain",
        metavar="ARGUMENTS",
        help="arguments of the plain run, or its script and arguments (default: as after --)",
    )
    group.add_argument(
        "--whole", metavar="PATTERN", help="parameters and modules whose wrong elements to tell (default: the first)"
    )
    group.add_argument("--steps", type=int, metavar="N", help="steps to compare (default: 2)")
    group.add_argument(
        "--deadline", type=float, metavar="SECONDS", help="time in which each run must end its steps (default: 600)"
    )
    command.set_defaults(run=run, arguments=[])
    _take_the_rest(command)


def _take_the_rest(command: argparse.ArgumentParser) -> None:
    """Keeps what follows `--` for the script; argparse takes no positional arguments after options."""
    parse = command.parse_known_args

    def divided(words: Sequence[str], namespace: Any = None) -> Any:
        place = words.index("--") if "--" in words else len(words)
        found, unknown = parse(words[:place], namespace)
        found.arguments = list(words[place + 1 :])
        return found, unknown

    command.parse_known_args = divided  # type: ignore[method-assign,assignment]  # of this one


def run(arguments: argparse.Namespace) -> int:
    """Prints the paragraph or the JSON, and returns 0 for runs that are alike, otherwise 1."""
    if arguments.tolerance is not None and not arguments.tolerance > 0:
        raise UsageError(f"--tolerance must be above 0, got {arguments.tolerance:g}")
    first: str = arguments.what[0]
    if first.endswith(".py"):
        with TemporaryDirectory() as folder:
            result = _result(arguments, *_recorded(arguments, Path(folder)))
            if (parameter := _to_see_whole(arguments, result)) is not None:
                arguments.whole = parameter
                result = _result(arguments, *_recorded(arguments, Path(folder)))
            return _show(arguments, result, "plain", "parallel")
    if given := list(values_of(arguments, ("ranks", "tensor", "schedule", "plain", "whole", "steps", "deadline"))):
        raise UsageError(f"--{given[0]} is for scripts: name a file that ends with .py")
    if arguments.arguments:
        raise UsageError("arguments after -- are for scripts: name a file that ends with .py")
    if len(arguments.what) != 2:
        raise UsageError(f"name two recordings, the plain run and the one to check, not {len(arguments.what)}")
    second = Path(arguments.what[1])
    return _show(arguments, _result(arguments, Path(first), second), Path(first).name, second.name)


def _to_see_whole(arguments: argparse.Namespace, result: Result) -> str | None:
    """The parameter, or the module of an output, that a second run shall record whole, to tell which of its elements
    differ.
    """
    first = result.first
    if first is None or arguments.whole is not None or first.what not in ("weight", "gradient", "output"):
        return None
    return (first.module if first.what == "output" else first.parameter) or None


def _recorded(arguments: argparse.Namespace, folder: Path) -> Sequence[Path]:
    """Makes both runs of a script."""
    from pipeflow.checking.scripts import DEADLINE, run_both

    if arguments.ranks is None or arguments.ranks < 1:
        raise UsageError("--ranks is missing: on how many ranks shall the script run?")
    if arguments.steps is not None and arguments.steps < 1:
        raise UsageError(f"--steps must be at least 1, got {arguments.steps}")
    if arguments.deadline is not None and not arguments.deadline > 0:
        raise UsageError(f"--deadline must be above 0 seconds, got {arguments.deadline:g}")
    script, *more = arguments.what
    if more:
        raise UsageError(f"arguments of the script follow --: -- {' '.join(more)}")
    with doing("running the script twice"):
        return run_both(
            Path(script),
            arguments.arguments,
            folder,
            ranks=arguments.ranks,
            tensor=arguments.tensor,
            schedule=arguments.schedule,
            plain_arguments=None if arguments.plain is None else _words(arguments.plain),
            steps=arguments.steps or 2,
            whole=arguments.whole or "",
            deadline=DEADLINE if arguments.deadline is None else arguments.deadline,
        )


def _words(text: str) -> list[str]:
    """The arguments in a text, as a shell divides it."""
    try:
        return split(text)
    except ValueError as error:
        raise UsageError(f"--plain cannot be divided into arguments: {error}") from None


def _result(arguments: argparse.Namespace, reference: Path, candidate: Path) -> Result:
    from pipeflow.checking.causes import check

    with doing("comparing the runs"):
        return check(reference, candidate, tolerance=arguments.tolerance, exact=arguments.exact)


def _show(arguments: argparse.Namespace, result: Result, reference: str, candidate: str) -> int:
    from pipeflow.checking.findings import others, page, paragraph

    if arguments.html is not None:
        write({arguments.html: page(result, reference, candidate)})
    if arguments.json:
        print(json.dumps(result.to_json()))
    else:
        notes = (line for note in result.notes for line in wrapped(f"note: {note}"))
        show(*wrapped(paragraph(result)), *others(result), *notes)
    return 0 if result.alike else 1
