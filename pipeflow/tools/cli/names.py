"""`pipeflow list`: all schedules. `pipeflow completion`: a script that completes the command in a shell."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping

from pipeflow.core.distributions import install
from pipeflow.core.errors import UsageError
from pipeflow.schedules import SCHEDULES, options_of
from pipeflow.tools.cli.options import Commands, flag

SHELLS = ("bash", "zsh", "fish")
EXAMPLES = """\
examples:
  eval "$(pipeflow completion bash)"                                  in ~/.bashrc
  pipeflow completion zsh > ~/.zfunc/_pipeflow                        with fpath+=~/.zfunc before compinit
  pipeflow completion fish > ~/.config/fish/completions/pipeflow.fish
"""


def add_list(commands: Commands) -> None:
    """Adds `pipeflow list` to the subcommands."""
    command = commands.add_parser("list", help="list the schedules and their options")
    command.set_defaults(run=run_list)


def run_list(_: argparse.Namespace) -> int:
    """Prints how many there are, and one line per schedule. In a narrow terminal, lines are folded at words."""
    summaries = {name: (generator.__doc__ or "").partition("\n")[0] for name, generator in SCHEDULES.items()}
    options = {name: " ".join(map(_flag, options_of(name))) for name in SCHEDULES}
    widths = max(map(len, options)), max(map(len, options.values()))
    lines = [
        f"{name:{widths[0]}}  {options[name]:{widths[1]}}  {summary}".rstrip() for name, summary in summaries.items()
    ]
    if sys.stdout.isatty():
        lines = _fitting(lines, summaries, options)
    print(f"{len(SCHEDULES)} schedules, each with its options; pipeflow draw NAME shows one.", *lines, sep="\n")
    return 0


def _fitting(lines: list[str], summaries: dict[str, str], options: dict[str, str]) -> list[str]:
    """The lines if they fit the terminal, otherwise folded ones."""
    import shutil
    import textwrap

    columns = shutil.get_terminal_size().columns
    if max(map(len, lines)) <= columns:
        return lines
    width = max(map(len, options)) + 2
    return [
        textwrap.fill(text, columns, initial_indent=first, subsequent_indent=" " * width, break_on_hyphens=False)
        for name, summary in summaries.items()
        for text, first in ((summary, f"{name:{width}}"), (options[name], " " * width))
        if text
    ]


def _flag(option: str) -> str:
    return "--costs" if option == "cost" else flag(option)


def add_completion(commands: Commands) -> None:
    """Adds the command and its argument."""
    command = commands.add_parser(
        "completion",
        help="print a completion script for a shell",
        epilog=EXAMPLES,
    )
    command.add_argument("shell", choices=SHELLS, metavar="SHELL", help=", ".join(SHELLS))
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Prints the script. Raises UsageError if shtab is not installed."""
    from pipeflow.planning.catalog import MODELS  # which `list` does not wait for
    from pipeflow.tools.cli.command import parser  # imported here, since that module imports this one

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
