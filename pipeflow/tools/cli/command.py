"""The command line: the subcommands and the exit status. Must not contain: what a subcommand does."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from functools import cache, partial
from importlib import import_module
from traceback import extract_tb

from pipeflow import __version__
from pipeflow.core.errors import UsageError
from pipeflow.core.text import printable
from pipeflow.tools.cli.options import Parser

LONGEST = 400  # letters of an error that are told
EXAMPLES = """\
examples:
  pipeflow draw 1f1b --ranks 4 --microbatches 8
  pipeflow draw zb-v --html zb-v.html --critical-path
  pipeflow explore zb-v --ranks 8 --microbatches 32
  pipeflow compare --ranks 8 --microbatches 32 --transfer 0.1
  pipeflow diff 1f1b zb-h1
  pipeflow diff 1f1b measured.json
  pipeflow plan gpt3-175b --pipeline 8 --tensor 8 --microbatches 64
  pipeflow plan gpt3-175b --devices 512 --batch 1536 --device a100-80gb
  pipeflow calibrate --output cluster.json
  pipeflow verify mine.csv
  pipeflow check plain parallel
  pipeflow run --ranks 8 train.py
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status: 0; 1 for an unsound schedule, or runs that differ; 2 for arguments
    that cannot work, and for a fault of pipeflow itself; 130 after an interrupt; 141 if the reader of the output went
    away.

    `argv` has the arguments after the command's name; None: those of the process.
    """
    try:
        words = list(sys.argv[1:] if argv is None else argv)
        if words[:1] == ["help"]:  # as git has it
            words = [*words[1:2], "--help"]
        arguments = parser(words[0] if words else None).parse_args(words, argparse.Namespace(words=words[1:]))
        status: int = arguments.run(arguments)
        sys.stdout.flush()
    except UsageError as error:
        return _failed(str(error))
    except BrokenPipeError:
        _let_go()
        return 141
    except OSError as error:  # errors of files are caught elsewhere, so this is standard output
        _let_go()
        return _failed(f"standard output: {error.strerror}")
    except KeyboardInterrupt:
        return 130
    except ModuleNotFoundError as error:
        return _failed(_missing(error))
    except Exception as error:  # a status of 1 would say that runs differ
        return _failed(_fault(error))
    return status


def _missing(error: ModuleNotFoundError) -> str:
    """The message for a package that is not there: `python -m pipeflow` also runs where nothing is installed, and draws
    into files.
    """
    package = (error.name or "").partition(".")[0]
    if package in ("", "pipeflow"):
        return _fault(error)
    return f"this needs {package}, which is not installed: run `pip install .` in the folder of pipeflow's README.md"


def _fault(error: Exception) -> str:
    """The message for an error that no command expects, with the place in the code where it was raised."""
    last = extract_tb(error.__traceback__)[-1]
    said = f"{type(error).__name__}: {error}"[:LONGEST]
    return f"this is a fault of pipeflow, please report it: {said} ({os.path.basename(last.filename)}:{last.lineno})"


def _help(parser: Parser, _: argparse.Namespace) -> int:
    """Prints the help: the command was called without arguments."""
    parser.print_help()
    return 0


def _failed(message: str) -> int:
    line = " ".join(map(str.strip, message.split("\n")))
    print(f"pipeflow: error: {printable(line)}", file=sys.stderr)
    return 2


def _let_go() -> None:
    """Discards what is left in the buffer of standard output."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


MODULES = {
    "list": "names",
    "draw": "schedules",
    "simulate": "schedules",
    "compare": "compare",
    "diff": "compare",
    "plan": "plan",
    "calibrate": "calibrate",
    "verify": "schedules",
    "export": "schedules",
    "explain": "explain",
    "check": "check",
    "run": "run",
    "explore": "explore",
    "completion": "names",
}
"""The subcommands, and the module of this package whose function `add_...` adds each to the parser."""


@cache
def parser(name: str | None = None) -> Parser:
    """The parser of the command `name`; for None or an unknown name, the parser of all commands."""
    parser = Parser(
        prog="pipeflow",
        description="Explore, draw, simulate, compare, verify and export pipeline schedules; plan the layout of a GPT.",
        epilog=EXAMPLES,
    )
    parser.add_argument("--version", action="version", version=f"pipeflow {__version__}")
    parser.set_defaults(run=partial(_help, parser))
    commands = parser.add_subparsers(metavar="COMMAND")
    for each in [name] if name in MODULES else MODULES:
        module = import_module(f"pipeflow.tools.cli.{MODULES[each]}")  # only those that are needed: it starts fast
        getattr(module, f"add_{each}")(commands)
    return parser
