"""State: what the page shows, read from the fields of a link, with the reader's own rows, and the schedules and
timelines that it asks for; those that were asked for last are kept. An answer takes some seconds at most, and bounded
memory.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, final

from pipeflow.core.action import Entry, actions_of
from pipeflow.core.analysis.measures import Measures
from pipeflow.core.analysis.simulation import Draft, draft
from pipeflow.core.errors import ScheduleError, UsageError, unknown
from pipeflow.core.placement import Placement
from pipeflow.core.rows import parse_cell
from pipeflow.core.schedule import Schedule
from pipeflow.core.soundness.verification import verify
from pipeflow.core.timeline import Timeline
from pipeflow.draw.captions import Unit
from pipeflow.planning.schedule_request import ReadSchedule, ScheduleRequest
from pipeflow.schedules import SCHEDULES, options_of
from pipeflow.schedules.orders.additions import STAGE_OPTIONS, stages_in
from pipeflow.schedules.registry import OTHER_NAMES
from pipeflow.tools.explore.fields import (
    CUSTOM,
    FIELDS,
    FILE,
    Field,
    file_of,
    is_file,
    joined,
    option_text,
    placement_text,
    split,
    title,
)
from pipeflow.tools.explore.prices import LinkPrices, ModelPrices

LARGEST = 65_536  # stages times microbatches, over all schedules of a request
SEARCH = 4  # how many times as long a schedule takes that is searched for, or offloads
MOST_STAGES = 4_096
MOST_RANKS = 256  # tables and drawings have a row per rank
MOST_CELLS = 65_536  # of a table
LONGEST = 100_000  # characters of any other field
MORE = 64  # microbatches that rows may have beyond the number of their actions


def _require_ranks(ranks: int) -> None:
    """Raises UsageError for more ranks than the page shows."""
    if ranks > MOST_RANKS:
        raise UsageError(f"the page shows at most {MOST_RANKS} ranks, got {ranks:,}")


def _require_table(rows: str) -> None:
    """Raises UsageError if a table has too many lines or cells."""
    if rows.strip().count("\n") >= MOST_RANKS:
        raise UsageError(f"the page shows at most {MOST_RANKS} ranks; the table has more lines")
    cells = sum(map(rows.count, ",; \t\n"))
    if cells > MOST_CELLS:
        raise UsageError(f"the table is too large for the page: at most {MOST_CELLS:,} cells, got {cells:,}")


def _require_length(name: str, text: str) -> None:
    """Raises UsageError if the text of a field is too long."""
    if name not in ("rows", "files") and len(text) > LONGEST:
        raise UsageError(f"{name} may have at most {LONGEST:,} characters, got {len(text):,}")


def custom_fields(schedule: Schedule) -> dict[str, str]:
    """The fields of a link that shows the rows of a schedule: one line per rank, blanks between the entries."""
    return {
        "schedule": CUSTOM,
        "placement": placement_text(schedule.placement),
        "rows_microbatches": str(schedule.num_microbatches),
        "rows": "\n".join(" ".join(map(str, row)) for row in schedule.rows),
    }


def read_rows(text: str, placement: Placement | None, microbatches: int, name: str) -> Schedule:
    """The schedule whose rows `text` has, one line per rank, with commas or blanks between the entries. It may be
    unsound. Ranks of the placement without a line have no actions.

    Args:
        text: the rows.
        placement: which rank holds which stage. None: as `Schedule.from_csv` finds it.
        microbatches: the least number of microbatches. There are more if an action has a higher one.
        name: name of the schedule.

    Raises ScheduleError with the line, the cell and its text, and UsageError for more rows than ranks, and for a
    microbatch that is far beyond all others.
    """
    lines = text.removesuffix("\n").split("\n")
    if placement is None:
        return _without_placement(text, lines, microbatches, name)
    ranks = placement.num_ranks
    _require_ranks(ranks)
    if len(lines) > ranks:
        raise UsageError(f"there are {len(lines)} rows for a placement on {ranks} ranks: remove rows")
    rows = tuple(tuple(_row(line, rank)) for rank, line in enumerate(lines)) + ((),) * (ranks - len(lines))
    actions = [action for row in rows for entry in row for action in actions_of(entry)]
    many = max([microbatches, *(action.microbatch + 1 for action in actions)])
    if many > max(microbatches, len(actions) + MORE) or many * placement.num_stages > LARGEST:
        raise UsageError(f"{many:,} microbatches are too many for rows with {len(actions)} actions: use lower numbers")
    return Schedule(name, placement, many, rows)


def _without_placement(text: str, lines: list[str], microbatches: int, name: str) -> Schedule:
    table = "\n".join(",".join(_cells(line)) for line in lines)
    made = Schedule.from_csv(table, name=name)
    return read_rows(text.strip("\n"), made.placement, max(microbatches, made.num_microbatches), name)


def _cells(line: str) -> list[str]:
    return re.split(r"[\s,]+", line.strip(" \t\r,")) if line.strip(" \t\r,") else []


def _row(line: str, rank: int) -> Iterator[Entry]:
    entries: list[Entry] = []
    for number, cell in enumerate(_cells(line), start=1):
        try:
            entries.append(parse_cell(cell, entries))
        except UsageError as error:
            raise ScheduleError(f"line {rank + 1} (rank {rank}), cell {number}: {error}") from None
        yield entries[-1]


MOST_SHOWN = 8  # schedules side by side
KEPT_FILES = 16


@final
@dataclass(frozen=True, slots=True)
class State:
    """The settings of the page, as its link holds them.

    Attributes:
        schedules: the names of the schedules, as `names` describes them.
        ranks, microbatches: the size of named schedules.
        options: given options of schedules, among them the memory caps.
        prices: the costs.
        own: per name that has options of its own, these.
        files: per name of a file, what is in it.
        rows, placement: the reader's own schedule as a table, and its placement if that is given.
        rows_microbatches: the number of microbatches that this schedule has at least.
        rows_file: the name of the file that this schedule comes from; empty: none.
        selected: the selected range of time, in the timelines' unit.
    """

    schedules: tuple[str, ...]
    ranks: int
    microbatches: int
    options: Mapping[str, Any]
    prices: LinkPrices
    own: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    files: Mapping[str, ReadSchedule] = field(default_factory=dict)
    rows: str = ""
    placement: Placement | None = None
    rows_microbatches: int = 1
    rows_file: str = ""
    selected: tuple[float, float] = (0.0, math.inf)

    @classmethod
    def of(cls, fields: Mapping[str, str]) -> State:
        """The state that the fields of a link describe. Raises UsageError with the name of a field that is wrong."""
        for name in fields:
            if name not in FIELDS:
                raise unknown("field", name[:40], FIELDS)
        for name, text in fields.items():
            _require_length(name, text)
        values = {name: _value(FIELDS[name], text) for name, text in fields.items() if text}
        values = {name: _value(each, each.default) for name, each in FIELDS.items() if each.default} | values
        options = {each.name for each in FIELDS.values() if each.group == "Schedule"}
        options -= {"schedule", "ranks", "microbatches"}
        names = _names(values["schedule"])
        files = _files(names, values.get("files", ""))
        costs_given = any(
            fields.get(each.name) for each in FIELDS.values() if each.group == "Costs" or each.name == "model"
        )
        measured = [file for file in files.values() if file.measured is not None and not costs_given]
        costs = {
            each.name: values[each.name]
            for each in FIELDS.values()
            if each.group == "Costs" and each.kind == "number" and each.name in values
        }
        state = cls(
            tuple(names),
            values["ranks"],
            values["microbatches"],
            {name: values[name] for name in FIELDS if name in options and name in values},
            LinkPrices(costs, values.get("factors", ()), ModelPrices.of(values), measured[0] if measured else None),
            {name: own for name, own in names.items() if own is not None},
            files,
            values.get("rows", ""),
            _placement(values["placement"]) if "placement" in values else None,
            values.get("rows_microbatches", 1),
            _file_name(values.get("rows_file", "")),
        )
        state.require_size(state.schedules)
        _require_table(state.rows)
        factor = state.unit.factor
        return replace(state, selected=(values.get("from", 0.0) / factor, values.get("to", math.inf) / factor))

    def options_for(self, name: str) -> dict[str, Any]:
        """The given options that the schedule `name` has: its own, or those of the link. Files have only stages."""
        known = _known_options(split(name)[0])
        return {option: value for option, value in self.own.get(name, self.options).items() if option in known}

    def require_size(self, names: Iterable[str], largest: int = LARGEST) -> None:
        """Raises UsageError if the named schedules among the names would take too long while somebody waits."""
        _require_ranks(self.ranks)
        named = [self.request(name) for name in names if split(name)[0] in SCHEDULES]
        weights = [SEARCH if each.is_made_for_costs else 1 for each in named]
        if any(weight * each.size[0] > MOST_STAGES for weight, each in zip(weights, named, strict=True)):
            raise UsageError(
                f"so many stages are too large for the page: {self.ranks:,} ranks may have {MOST_STAGES:,} together"
            )
        if sum(weight * math.prod(each.size) for weight, each in zip(weights, named, strict=True)) > largest:
            asked = f"{self.ranks:,} ranks x {self.microbatches:,} microbatches is too large for the page"
            many = f" for {len(named)} schedules together" if len(named) > 1 else ""
            counted = f"; a search or an offload counts {SEARCH} times" if SEARCH in weights else ""
            raise UsageError(f"{asked}: stages times microbatches may be at most {largest:,}{many}{counted}")

    def with_own_options(self, name: str) -> str:
        """The name with the options that it has now as its own. Files and the reader's own schedule have none."""
        if split(name)[0] not in SCHEDULES or name in self.own:
            return name
        return joined(name, {option: option_text(value) for option, value in self.options_for(name).items()})

    @property
    def unit(self) -> Unit:
        """The unit of times."""
        return self.prices.unit(self.ranks, self.microbatches)

    def request(self, name: str, candidates: int | None = None) -> ScheduleRequest:
        """What is asked for with the name `name`, with the options that it has. A search tries as many orders as
        `candidates` says. Raises UsageError for rows of the reader that cannot be read.
        """
        prices = self.prices
        common: dict[str, Any] = {"gathers": prices.gathers, "reduces": prices.reduces, "steps": prices.steps}
        if name == CUSTOM:
            if not (self.rows or self.placement):
                raise UsageError("there is no schedule of your own yet: choose one and edit it")
            read = _read_rows(self.rows, self.placement, self.rows_microbatches)
            return ScheduleRequest(name, prices, read=read, **common)
        given = self.options_for(name)
        file = file_of(name)
        return ScheduleRequest(
            split(name)[0],
            prices,
            self.ranks,
            self.microbatches,
            tuple((option, value) for option, value in given.items() if option not in STAGE_OPTIONS),
            tuple((option, value) for option, value in given.items() if option in STAGE_OPTIONS),
            None if file is None else self.files[file],
            title(name),
            candidates,
            **common,
        )

    def schedule(self, name: str) -> Schedule:
        """The schedule with this name. Raises UsageError if it cannot be made."""
        return _schedule(self.request(name))

    def timeline(self, name: str) -> Timeline:
        """The timeline of the schedule: simulated, or as it was measured. Raises UsageError for one that cannot be
        made, and ScheduleError for one that cannot run.
        """
        request = self.request(name)
        return request.measured or _timeline(request)

    def draft(self) -> Draft:
        """The reader's own schedule in time, also if it cannot run. Raises UsageError if its rows cannot be read."""
        return _draft(self.request(CUSTOM))

    def measures(self, name: str, candidates: int | None = None) -> Measures:
        """The measures of the schedule. Raises as `timeline` does. What is not shown is not kept for it."""
        if name in self.schedules:
            return Measures.of(self.schedule(name), self.timeline(name))
        return _measures(self.request(name, candidates))


def _schedule(request: ScheduleRequest) -> Schedule:
    """A schedule; one that is the same under all costs is made once for all of them."""
    return _made(request if request.is_made_for_costs else replace(request, prices=LinkPrices({})))


@lru_cache(MOST_SHOWN)
def _made(request: ScheduleRequest) -> Schedule:
    return request.schedule()


@lru_cache(MOST_SHOWN)
def _timeline(request: ScheduleRequest) -> Timeline:
    return request.timeline(_schedule(request))


@lru_cache(MOST_SHOWN)
def _draft(request: ScheduleRequest) -> Draft:
    made = _schedule(request)
    return draft(made, request.prices.cost_model(made.placement))


@lru_cache(1024)
def _measures(request: ScheduleRequest) -> Measures:
    made = request.schedule()
    return Measures.of(made, request.timeline(made))


@lru_cache(MOST_SHOWN)
def _read_rows(rows: str, placement: Placement | None, microbatches: int) -> ReadSchedule:
    return ReadSchedule(CUSTOM, (rows, placement, microbatches), read_rows(rows, placement, microbatches, CUSTOM))


@lru_cache(KEPT_FILES)
def opened(name: str, text: str) -> ReadSchedule:
    """The schedule or timeline in the text of a file. Raises UsageError that names the wrong place, and for a
    timeline of an unsound schedule.
    """
    try:
        read = ReadSchedule.of(name, text)
        if read.measured is not None:
            named = f"{read.measured.name} ({name})"
            read = replace(read, measured=replace(read.measured, name=named))
            read = replace(read, schedule=replace(read.schedule, name=named))
        violations = verify(read.schedule)
    except UsageError as error:
        raise UsageError(f"{name}: {error}") from None
    if not violations:
        return read
    more = f" (and {len(violations) - 1} more)" if len(violations) > 1 else ""
    problem = f"{name} is not a sound schedule: {violations[0]}{more}"
    if read.measured is not None:
        raise UsageError(problem)
    return replace(read, problem=problem)


def _value(field: Field, text: str) -> Any:
    """The value of a field from its text."""
    match field.kind:
        case "whole":
            return _whole(field, text)
        case "number":
            return _number(field, text)
        case "numbers" if "," in text or field.name == "factors":
            return tuple(_number(field, part) for part in text.split(","))
        case "numbers":
            return _number(field, text)
        case "stages":
            return _stages(field, text)
        case "flag" if text != "1":
            raise UsageError(f"{field.name} is 1 or left out, got {text[:40]!r}")
        case "choice" if text not in field.choices:
            raise UsageError(f"{field.name} must be one of {', '.join(field.choices)}, got {text[:40]!r}")
    return text


def _stages(field: Field, text: str) -> bool | tuple[int, ...]:
    try:
        return stages_in(text)
    except UsageError as error:
        raise UsageError(f"{field.name}: {error}") from None


def _whole(field: Field, text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 10 and int(text) >= field.least):
        raise UsageError(f"{field.name} must be a whole number of at least {field.least:g}, got {text[:40]!r}")
    return int(text)


def _number(field: Field, text: str) -> float:
    """A number; an int if it is whole."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not (math.isfinite(number) and number >= 0):
        raise UsageError(f"{field.name} must be a number that is finite and not negative, got {text[:40]!r}")
    return int(number) if number.is_integer() else number


def _names(text: str) -> dict[str, dict[str, Any] | None]:
    """The names, each with its own options, or None."""
    names = {name: _own_options(name) for name in text.split(",")}
    if len(names) > MOST_SHOWN:
        raise UsageError(f"at most {MOST_SHOWN} schedules can be shown side by side, got {len(names)}")
    return names


def _own_options(text: str) -> dict[str, Any] | None:
    name, options = split(text)
    if text == CUSTOM or file_of(text) is not None:
        return None
    if name == FILE:
        _file_name(text)
    if name not in SCHEDULES:
        raise unknown("schedule", name[:40], SCHEDULES, OTHER_NAMES)
    for option in options or ():
        if option not in _known_options(name) or option not in FIELDS:
            raise UsageError(f"schedule {name!r} does not take {option[:40]!r}")
    return options and {option: _value(FIELDS[option], value) for option, value in options.items()}


def _known_options(name: str) -> tuple[str, ...]:
    """The options that a schedule of the registry has, or a file."""
    return (*(options_of(name) if name in SCHEDULES else ()), *STAGE_OPTIONS)


def _file_name(text: str) -> str:
    if text and not is_file(text):
        raise UsageError(f"{text[:80]!r} is not the name of a file: letters, digits, dots, underscores and hyphens")
    return text


def texts_in(text: str) -> dict[str, str]:
    """The texts of files, by their names, from a JSON object. Raises UsageError for anything else."""
    try:
        texts = json.loads(text or "{}")
    except (ValueError, RecursionError):
        texts = None
    if not isinstance(texts, dict) or not all(isinstance(each, str) for each in texts.values()):
        raise UsageError("files must be a JSON object with the text of each file")
    return texts


def _files(names: Iterable[str], text: str) -> dict[str, ReadSchedule]:
    """The files among the names. `text` is a JSON object with their texts."""
    texts = texts_in(text)
    files = [name for name in map(file_of, names) if name is not None]
    for name in files:
        if name not in texts:
            raise UsageError(f"{name} is not in this tab: open the file again, or remove it")
    return {name: opened(name, texts[name]) for name in files}


def _placement(text: str) -> Placement:
    """Reads what `placement_text` writes."""
    try:
        return Placement(tuple(tuple(int(rank) for rank in path.split(".")) for path in text.split("_")))
    except ScheduleError:
        raise
    except ValueError:
        raise UsageError(f"placement must be like 0.1.2.3, the rank of each stage, got {text[:40]!r}") from None
