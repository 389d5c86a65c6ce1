"""Options that several commands share. Options of schedules are read from the registry, so a new family needs no change
here.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType, NoneType
from typing import Any, Literal, NoReturn, TypeAlias, TypeVar, get_args, get_origin, get_type_hints

from pipeflow.core.cost import EVEN_COSTS, LARGEST, SMALLEST
from pipeflow.core.errors import UsageError, closest, meant_by, nearest
from pipeflow.core.placement import Placement
from pipeflow.core.text import PER_SECOND
from pipeflow.schedules import SCHEDULES
from pipeflow.schedules.orders.additions import STAGE_OPTIONS, stages_in
from pipeflow.schedules.registry import OTHER_NAMES, Option, family_options

Value = TypeVar("Value")
Commands: TypeAlias = "argparse._SubParsersAction[Parser]"
UNITS = ("unit", "factor")
PLACEMENTS: dict[str, Callable[[int, int], Placement]] = {  # from the numbers of ranks and stages
    "linear": lambda ranks, _: Placement.linear(ranks),
    "looped": lambda ranks, stages: Placement.looped(ranks, max(stages // ranks, 1)),
    "vee": lambda ranks, stages: Placement.zigzag(ranks, max(stages // (2 * ranks), 1)),  # as many vees as fit
    "bidirectional": lambda ranks, _: Placement.bidirectional(ranks),
}


OTHER_OPTIONS = {  # what options of other programs are called here, without "-" and "_"; a command has one of them
    **dict.fromkeys(("tp", "tpsize", "tensorparallel", "tensormodelparallelsize"), ("--tensor",)),
    **dict.fromkeys(("pp", "ppsize", "pipelineparallel", "pipelinemodelparallelsize"), ("--pipeline", "--ranks")),
    **dict.fromkeys(("dp", "dpsize", "dataparallel", "replicas"), ("--data",)),
    **dict.fromkeys(("gpus", "numgpus", "ngpus", "worldsize"), ("--devices", "--ranks")),
    **dict.fromkeys(("gpu", "gputype"), ("--device",)),
    **dict.fromkeys(("n", "np", "nproc", "nprocpernode"), ("--ranks", "--devices")),
    **dict.fromkeys(("o", "out", "output", "format", "save"), ("--svg", "--csv")),
    **dict.fromkeys(("stages", "numstages"), ("--ranks", "--pipeline")),
    **dict.fromkeys(("globalbatchsize", "batchsize", "gbs"), ("--batch", "--microbatches")),
    **dict.fromkeys(("moelayerfreq", "interleavemoelayerstep", "decodersparsestep"), ("--expert-layers",)),
    **dict.fromkeys(("mbs", "nummicrobatches", "gradientaccumulationsteps"), ("--microbatches",)),
}


class Parser(argparse.ArgumentParser):
    """An argument parser that raises errors as UsageError, and suggests what a misspelt word may mean."""

    def __init__(self, **options: Any) -> None:
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, **options)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """The arguments; `given` has those that differ from their defaults, as they are typed. Raises UsageError for
        those that nothing takes, with the nearest option, or the schedule that another program's option chooses.
        """
        found, extra = self.parse_known_args(args, namespace)
        if extra:
            option = extra[0].partition("=")[0]
            chosen = meant_by(option, OTHER_NAMES)
            own = [*self._asked(args)._known_options()]
            alike = next((each for each in meant_by(option, OTHER_OPTIONS) or () if each in own), None)
            near = alike or closest(option, [*self._known_options()], cutoff=0.75)
            near = f"the schedule {chosen}" if chosen else near
            self._asked(args).error(
                f"unrecognized arguments: {' '.join(extra)}{f'; did you mean {near}?' if near else ''}"
            )
        found.given = {
            action.dest: next(reversed(action.option_strings), action.metavar)
            for action in self._asked(args)._actions
            if getattr(found, action.dest, action.default) != action.default
        }
        return found

    def _asked(self, args: Any) -> Parser:
        """The parser of the command that the arguments begin with, else this one."""
        commands = next((each for each in self._actions if isinstance(each, argparse._SubParsersAction)), None)
        first = next(iter(sys.argv[1:] if args is None else args), "")
        parser: Parser = self if commands is None else commands.choices.get(first, self)
        return parser

    def _known_options(self) -> Iterator[str]:
        """The options of this parser and of its commands."""
        for action in self._actions:
            yield from action.option_strings
            if isinstance(action, argparse._SubParsersAction):
                for command in action.choices.values():
                    yield from command._known_options()

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            said = nearest(str(value), [str(each) for each in action.choices])
            raise argparse.ArgumentError(action, f"invalid choice: {value!r}; {said}")

    def error(self, message: str) -> NoReturn:
        """Raises UsageError with the message, what an option that was left empty needs, and a hint at the help."""
        lacks = re.fullmatch(r"argument (-.*): expected one argument|the following .* required: (--[^,]*)", message)
        option = (lacks[1] or lacks[2]).rpartition("/")[2] if lacks else None
        action = next((each for each in self._actions if option in each.option_strings), None)
        if action is not None and action.metavar:
            message += f", as in {action.option_strings[-1]} {action.metavar}"
        raise UsageError(f"{message} (see {self.prog} --help)")


def schedule_name(text: str) -> str:
    """The SCHEDULE argument: the name of a schedule in upper or lower case, unless there is a file with this name."""
    name = text.lower()
    if len(names := name.split(",")) > 1 and all(each in SCHEDULES for each in names):
        raise argparse.ArgumentTypeError(f"put spaces between names, as in {' '.join(names)}")
    return name if name in SCHEDULES and not os.path.isfile(text) else text


def flag(option: str) -> str:
    """The name of an option as it is typed."""
    return f"--{option.replace('_', '-')}"


def add_family_options(group: argparse._ArgumentGroup) -> None:
    """Adds an option for each of `family_options`: a word where it takes words, a number, or numbers with commas in
    between where it takes one per rank. The help is the option's meaning, and the schedules that have it.
    """
    for option in map(Option.named, family_options()):
        takes: dict[str, Any] = {"type": _number, "metavar": "N"}
        if option.choices:
            takes = {"choices": option.choices}
        elif option.per_rank:
            takes = {"type": _numbers, "metavar": "N[,N...]"}
        whose = f"for {', '.join(option.takers)}"
        group.add_argument(flag(option.name), help=f"{option.meaning} ({whose})" if option.meaning else whose, **takes)


def add_fields(
    group: argparse._ArgumentGroup,
    kind: type,
    names: Iterable[str],
    *,
    choices: Mapping[str, Sequence[Any]] = MappingProxyType({}),
    alone: Mapping[str, object] = MappingProxyType({}),
    readers: Mapping[str, Callable[[str], Any]] = MappingProxyType({}),
    switches: Collection[str] = (),
    usual: object = None,
) -> None:
    """Adds an option for each of these fields of a dataclass, which is None unless it is given. What it takes follows
    from the field's type, and its help is what the docstring of the class says of the field.

    Args:
        group: where to add them.
        kind: the dataclass.
        names: the fields.
        choices: by field the words or numbers that it takes, where its type does not say them.
        alone: by field the value of the option without one.
        readers: by field what reads its text, where it takes a number or a list.
        switches: those that can only be switched on.
        usual: an instance whose values are the defaults to tell.
    """
    from pipeflow.planning.setup import meanings  # which only plans need

    hints, said = get_type_hints(kind), meanings(kind)
    for name in names:
        takes = _takes(hints[name], choices.get(name))
        if name in readers:
            takes = {"type": argument(readers[name]), "metavar": "N|LIST"}
        if name in switches:
            takes = {"action": "store_true", "default": None}
        if name in alone:
            takes |= {"nargs": "?", "const": alone[name]}
        notes = [f"{alone[name]} without a value"] if name in alone else []
        if "choices" not in takes and name in choices:
            notes.append(f"of {', '.join(choices[name])}")
        default = getattr(usual, name, None)
        default = getattr(default, "name", default)
        if isinstance(default, int | float | str) and not isinstance(default, bool):
            notes.append(f"default: {default:g}" if isinstance(default, float) else f"default: {default}")
        help_ = re.sub(r"`(\w+)`", lambda field: flag(field[1]), said[name]).rstrip(".")
        group.add_argument(flag(name), help=help_ + f" ({'; '.join(notes)})" * bool(notes), **takes)


def _takes(hint: Any, choices: Sequence[Any] | None) -> dict[str, Any]:
    """The arguments of `add_argument` for a field of this type, or None."""
    kind = next(each for each in get_args(hint) if each is not NoneType) if NoneType in get_args(hint) else hint
    if kind is bool:
        return {"action": argparse.BooleanOptionalAction}
    if get_origin(kind) is tuple:
        return {"type": words, "metavar": "NAME,..."}
    if choices is None and get_origin(kind) is Literal:
        choices = get_args(kind)
    if choices is not None:
        return {"type": type(choices[0]), "choices": choices}
    return {"type": kind, "metavar": "X" if kind is float else "N"}


def values_of(arguments: argparse.Namespace, names: Iterable[str]) -> dict[str, Any]:
    """The values of those options among `names` that were given."""
    return {name: value for name in names if (value := getattr(arguments, name)) is not None}


def words(text: str) -> tuple[str, ...]:
    """The words of a list with commas."""
    return tuple(word.strip() for word in text.split(",") if word.strip())


def add_schedule(command: Parser) -> None:
    """Adds the argument that names a schedule."""
    help_ = "a name from `pipeflow list`, a CSV file, or a timeline in a JSON file"
    command.add_argument("schedule", type=schedule_name, metavar="SCHEDULE", help=help_)


def add_sizes(command: Parser, *, has_files: bool = True) -> None:
    """Adds options for the size of a named schedule, and for what a file does not say."""
    group = command.add_argument_group("schedule")
    add = group.add_argument
    add("--ranks", type=_whole, metavar="N", help="number of pipeline ranks (default: 4)")
    usual = "8, or as many as the file has" if has_files else "8"
    add("--microbatches", type=_whole, metavar="N", help=f"number of microbatches (default: {usual})")
    add_family_options(group)
    for option, meaning in STAGE_OPTIONS.items():
        add(flag(option), type=argument(stages_in), metavar="STAGES", help=meaning)
    if has_files:
        help_ = "placement of the stages of a CSV file (default: read from its lines)"
        add("--placement", choices=PLACEMENTS, help=help_)
        add("--forward-only", action="store_true", help="leave out the backwards, as in evaluation")


def add_costs(command: Parser, *, has_file: bool = True) -> None:
    """Adds options for times and bytes that are the same for all ranks, and for a file with other ones."""
    add = command.add_argument_group(
        "costs", "time per microbatch for all layers of one rank, in any unit"
    ).add_argument
    for option, cost in EVEN_COSTS.items():
        metavar = "BYTES" if cost.unit == "bytes" else "T"
        add(flag(option), type=_cost, metavar=metavar, help=f"{cost.meaning} (default: {cost.absent or cost.default})")
    if has_file:
        help_ = "read per-stage costs from a JSON file with the fields of CostModel, instead of these options"
        add("--costs", metavar="FILE", help=help_)


def add_units(command: Parser) -> None:
    """Adds options for the unit of written times."""
    add = command.add_argument_group("times").add_argument
    known = ", ".join(PER_SECOND)
    help_ = f"unit to write after times; times in seconds are converted to {known} (default: a readable one)"
    add("--unit", type=_unit, default="", metavar="NAME", help=help_)
    add("--factor", type=_factor, default=1.0, metavar="X", help="multiply times by this number, such as 1000")


def argument(read: Callable[[str], Value]) -> Callable[[str], Value]:
    """A function that reads a text and raises UsageError, as a type of arguments."""

    def value(text: str) -> Value:
        try:
            return read(text)
        except UsageError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return value


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"it must be a whole number, got {text!r}") from None


def _number(text: str) -> float:
    """An int if the number is whole. Further checks are left to the schedule."""
    try:
        number = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"it must be a number, got {text!r}") from None
    return int(number) if number.is_integer() else number


def _numbers(text: str) -> float | tuple[float, ...]:
    """A number, or several with commas between."""
    return tuple(map(_number, text.split(","))) if "," in text else _number(text)


def _cost(text: str) -> float:
    number = _number(text)
    if not (math.isfinite(number) and number >= 0):
        raise argparse.ArgumentTypeError(f"it must be finite and not negative, got {text}")
    if number and not SMALLEST <= number <= LARGEST:
        raise argparse.ArgumentTypeError(f"it must be 0, or from {SMALLEST:g} to {LARGEST:g}, got {text}")
    return number


def _unit(text: str) -> str:
    if not text.isprintable():
        raise argparse.ArgumentTypeError(f"it must be a name without control characters, got {text!r}")
    return text


def _factor(text: str) -> float:
    number = _number(text)
    if not (math.isfinite(number) and number > 0):
        raise argparse.ArgumentTypeError(f"it must be positive, got {text}")
    if not SMALLEST <= number <= LARGEST:
        raise argparse.ArgumentTypeError(f"it must be from {SMALLEST:g} to {LARGEST:g}, got {text}")
    return number
