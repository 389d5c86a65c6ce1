"""The command line itself: which commands there are, and how they end."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from functools import cache, partial

from pipeflow import __version__
from pipeflow.cli import compare, completion, diff, draw, export, plan, simulate, verify
from pipeflow.cli import list as list_
from pipeflow.cli.options import Parser
from pipeflow.cli.progress import timed
from pipeflow.core.errors import UsageError
from pipeflow.core.text import printable

EXAMPLES = """\
examples:
  pipeflow draw 1f1b --ranks 4 --microbatches 8
  pipeflow draw zb-v --html zb-v.html --critical-path
  pipeflow compare --ranks 8 --microbatches 32 --transfer 0.1
  pipeflow diff 1f1b zb-h1
  pipeflow diff 1f1b measured.json --unit ms --factor 1000
  pipeflow plan gpt3-175b --pipeline 8 --tensor 8 --microbatches 64
  pipeflow verify mine.csv
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status: 0, 1 for an unsound schedule, 2 for arguments that cannot
    work, 130 when it was interrupted, 141 when the reader of the output went away.
    """
    try:
        arguments = _parser().parse_args(argv)
        with timed():
            status: int = arguments.run(arguments)
        sys.stdout.flush()
    except UsageError as error:
        return _failed(str(error))
    except BrokenPipeError:
        _let_go()
        return 141
    except OSError as error:  # files are seen to where they are used; what is left is standard output
        _let_go()
        return _failed(f"standard output: {error.strerror}")
    except KeyboardInterrupt:
        return 130
    return status


def _help(parser: Parser, _: argparse.Namespace) -> int:
    """What the command says that is called without anything."""
    parser.print_help()
    return 0


def _failed(message: str) -> int:
    line = " ".join(map(str.strip, message.split("\n")))
    print(f"pipeflow: error: {printable(line)}", file=sys.stderr)
    return 2


def _let_go() -> None:
    """What is left in the buffer of standard output goes nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@cache
def _parser() -> Parser:
    parser = Parser(
        prog="pipeflow",
        description="Pipeline schedules: list, draw, price, compare, prove, export.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"pipeflow {__version__}")
    parser.set_defaults(run=partial(_help, parser))
    commands = parser.add_subparsers(metavar="COMMAND")
    for module in (list_, draw, simulate, compare, diff, plan, verify, export):
        module.add_to(commands)
    completion.add_to(commands, parser)
    return parser
