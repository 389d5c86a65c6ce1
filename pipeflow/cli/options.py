"""Options that several commands share. Those of the schedules are read off the registry, so a new family needs no
change here.
"""

from __future__ import annotations

import argparse
import math
import os
from functools import cache
from typing import TYPE_CHECKING, NoReturn

from pipeflow.core.cost import LARGEST, SMALLEST
from pipeflow.core.errors import UsageError
from pipeflow.schedules import SCHEDULES, options_of

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction["Parser"]

PLACEMENTS = ("linear", "looped", "vee", "bidirectional")
EVEN_COSTS = {  # the arguments of CostModel.even: what each is, and its default
    "forward": "a forward: 1 unless given",
    "backward_input": "the input-gradient half of a backward: 1 unless given",
    "backward_weight": "its weight-gradient half: 1 unless given",
    "transfer": "from one rank to another: 0 unless given",
    "overlap": "what a pair hides of its shorter half, 0 to 1: 0 unless given",
    "saved_bytes": "bytes that a forward keeps for its backward",
    "deferred_bytes": "bytes of it that the weight-gradient half still needs",
    "reduce": "reducing the share's weight gradients over the ranks that hold it: not planned unless given",
}


class Parser(argparse.ArgumentParser):
    """A parser whose errors are UsageErrors."""

    def error(self, message: str) -> NoReturn:
        """Says what is wrong, and where help is."""
        raise UsageError(f"{message} (see {self.prog} --help)")


def schedule_name(text: str) -> str:
    """What a SCHEDULE argument says: a schedule's name in any case of letters, unless there is a file of that name."""
    name = text.lower()
    return name if name in SCHEDULES and not os.path.isfile(text) else text


def flag(option: str) -> str:
    """An option's name as it is typed."""
    return f"--{option.replace('_', '-')}"


def family_options() -> list[str]:
    """The options that some schedule has, but for its costs, which have options of their own."""
    return sorted({option for name in SCHEDULES for option in options_of(name)} - {"cost"})


@cache
def schedule_argument() -> Parser:
    """Which schedule it is about."""
    parser = Parser(add_help=False)
    help_ = "a name from `pipeflow list`, a CSV file, or a timeline kept as JSON"
    parser.add_argument("schedule", type=schedule_name, metavar="SCHEDULE", help=help_)
    return parser


@cache
def schedule_options() -> Parser:
    """The sizes of a named one, what a file leaves open."""
    parser = Parser(add_help=False)
    group = parser.add_argument_group("schedule")
    group.add_argument("--ranks", type=_whole, metavar="N", help="4 unless given")
    group.add_argument("--microbatches", type=_whole, metavar="N", help="8 unless given, or as many as the file has")
    for option in family_options():
        takers = ", ".join(name for name in SCHEDULES if option in options_of(name))
        group.add_argument(flag(option), type=_number, metavar="N", help=f"of {takers}")
    group.add_argument(
        "--placement", choices=PLACEMENTS, help="of a CSV file's stages: read off its lines unless given"
    )
    group.add_argument("--forward-only", action="store_true", help="without the backwards, as in evaluation")
    return parser


@cache
def cost_options() -> Parser:
    """How long everything takes, and what it keeps."""
    parser = Parser(add_help=False)
    group = parser.add_argument_group("costs", "in any unit; of one microbatch on one rank's whole share of the model")
    for option, meaning in EVEN_COSTS.items():
        metavar = "BYTES" if option.endswith("bytes") else "T"
        group.add_argument(flag(option), type=_cost, metavar=metavar, help=meaning)
    group.add_argument("--costs", metavar="FILE", help="instead: JSON with the fields of CostModel, lists per stage")
    return parser


@cache
def unit_options() -> Parser:
    """How times are written."""
    parser = Parser(add_help=False)
    group = parser.add_argument_group("times")
    group.add_argument("--unit", default="", metavar="NAME", help="written after times, as in --unit ms")
    group.add_argument("--factor", type=_factor, default=1.0, metavar="X", help="times are multiplied by it: 1000")
    return parser


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"it must be a whole number, got {text!r}") from None


def _number(text: str) -> float:
    """Whole where it is: what else there may be, a schedule says itself."""
    try:
        number = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"it must be a number, got {text!r}") from None
    return int(number) if number.is_integer() else number


def _cost(text: str) -> float:
    number = _number(text)
    if not (math.isfinite(number) and number >= 0):
        raise argparse.ArgumentTypeError(f"it must be finite and not negative, got {text}")
    if number and not SMALLEST <= number <= LARGEST:
        raise argparse.ArgumentTypeError(f"it must be 0, or from {SMALLEST:g} to {LARGEST:g}, got {text}")
    return number


def _factor(text: str) -> float:
    number = _number(text)
    if not (math.isfinite(number) and number > 0):
        raise argparse.ArgumentTypeError(f"it must be positive, got {text}")
    if not SMALLEST <= number <= LARGEST:
        raise argparse.ArgumentTypeError(f"it must be from {SMALLEST:g} to {LARGEST:g}, got {text}")
    return number
