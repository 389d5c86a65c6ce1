"""Rows: the table of a schedule that a reader builds, as a link has it. Other than a schedule's CSV it may have rows
without actions. Must not contain: what is wrong with a schedule.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from pipeflow.core.action import Entry, actions_of
from pipeflow.core.errors import ScheduleError, UsageError
from pipeflow.core.placement import Placement
from pipeflow.core.schedule import Schedule
from pipeflow.core.table_cells import parse_cell
from pipeflow.explore.fields import CUSTOM, placement_text
from pipeflow.explore.limits import LARGEST, require_ranks

MORE = 64  # microbatches that rows may have beyond the number of their actions


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
    require_ranks(ranks)
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
