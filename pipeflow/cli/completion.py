"""`pipeflow completion`: a script that completes the command in a shell."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import TYPE_CHECKING

from pipeflow.core.errors import UsageError
from pipeflow.core.extras import install
from pipeflow.planning.catalog import MODELS
from pipeflow.schedules import SCHEDULES

if TYPE_CHECKING:
    from pipeflow.cli.options import Commands

SHELLS = ("bash", "zsh", "fish")
EXAMPLES = """\
examples:
  eval "$(pipeflow completion bash)"                                  in ~/.bashrc
  pipeflow completion zsh > ~/.zfunc/_pipeflow                        with fpath+=~/.zfunc before compinit
  pipeflow completion fish > ~/.config/fish/completions/pipeflow.fish
"""


def add_to(commands: Commands) -> None:
    """Adds the command and its argument."""
    command = commands.add_parser(
        "completion",
        help="print a completion script for a shell",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("shell", choices=SHELLS, metavar="SHELL", help=", ".join(SHELLS))
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Prints the script. Raises UsageError if shtab is not installed."""
    from pipeflow.cli.command import parser  # imported here, since that module imports this one

    try:
        import shtab
    except ImportError as error:
        raise UsageError(f"completion needs shtab: {install('completion')}") from error
    schedules = shtab.cmd(f"echo {' '.join(SCHEDULES)}; ls")
    models = shtab.cmd(f"echo {' '.join(MODELS)}")
    _describe(parser(), {"FILE": shtab.FILE, **dict.fromkeys(("SCHEDULE", "A", "B"), schedules), "MODEL": models})
    print(shtab.complete(parser(), shell=arguments.shell))
    return 0


def _describe(parser: argparse.ArgumentParser, by_metavar: Mapping[str, object]) -> None:
    """Sets what completes each argument: shtab reads it from an attribute of the argument."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for each in action.choices.values():
                _describe(each, by_metavar)
        elif action.metavar in by_metavar:
            vars(action)["complete"] = by_metavar[str(action.metavar)]
