"""A timeline as JSON and back. Must not contain: reading and writing files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from pipeflow.core.action import Action
from pipeflow.core.cost import LARGEST, require_unit
from pipeflow.core.dataflow import Content
from pipeflow.core.errors import UsageError
from pipeflow.core.json_values import number, parse
from pipeflow.core.placement import Placement
from pipeflow.core.span import Row, Span


class Fields(NamedTuple):
    """The fields of a `Timeline`, in its order."""

    name: str
    placement: Placement
    rows: tuple[Row, ...]
    saved_bytes: tuple[float, ...]
    deferred_bytes: tuple[float, ...]
    kept_bytes: Mapping[Content, tuple[float, ...]]
    unit: str
    microbatch_factors: tuple[float, ...]


def to_json(timeline: Fields) -> str:
    """The timeline as JSON, with one line per span: action, start, end, and the other action of a pair."""
    fields = {
        "name": timeline.name,
        "paths": timeline.placement.paths,
        "saved_bytes": timeline.saved_bytes,
        "deferred_bytes": timeline.deferred_bytes,
        **({"kept_bytes": timeline.kept_bytes} if timeline.kept_bytes else {}),
        **({"unit": timeline.unit} if timeline.unit else {}),
        **({"microbatch_factors": timeline.microbatch_factors} if timeline.microbatch_factors else {}),
    }
    lines = [f" {json.dumps(key)}: {json.dumps(value)},\n" for key, value in fields.items()]
    rows = ",\n".join("  [" + ",\n   ".join(json.dumps(_cells(span)) for span in row) + "]" for row in timeline.rows)
    return "{\n" + "".join(lines) + f' "rows": [\n{rows}\n ]\n}}\n'


def _cells(span: Span) -> list[str | float]:
    partner = [] if span.partner is None else [str(span.partner)]
    return [str(span.action), span.start, span.end, *partner]


def from_json(text: str) -> Fields:
    """Reads the text of `to_json`. Raises UsageError with the place that is wrong."""
    fields = parse(text)
    if not isinstance(fields, dict) or not {"paths", "rows"} <= set(fields):
        raise UsageError("this is not a timeline: it lacks paths or rows, which Timeline.to_json writes")
    if unknown := sorted(set(fields) - {"paths", *Fields._fields}):
        raise UsageError(f"a timeline has no field {', '.join(unknown)}")
    paths = tuple(
        tuple(_whole(rank, "paths") for rank in _list(path, "paths")) for path in _list(fields["paths"], "paths")
    )
    placement = Placement(paths)
    rows = _rows(fields["rows"], placement)
    return Fields(
        str(fields.get("name", "timeline")),
        placement,
        rows,
        _bytes(fields, "saved_bytes", placement),
        _bytes(fields, "deferred_bytes", placement),
        _kept_bytes(fields.get("kept_bytes", {}), placement),
        _unit(fields.get("unit", "")),
        _factors(fields.get("microbatch_factors", []), rows),
    )


def _unit(value: object) -> str:
    require_unit(unit := str(value))
    return unit


def _rows(value: object, placement: Placement) -> tuple[Row, ...]:
    rows = _list(value, "rows")
    if len(rows) != placement.num_ranks:
        raise UsageError(f"rows: there are {len(rows)} for a placement on {placement.num_ranks} ranks")
    return tuple(_row(row, rank, placement) for rank, row in enumerate(rows))


def _row(cells: object, rank: int, placement: Placement) -> Row:
    row: list[Span] = []
    for position, cell in enumerate(_list(cells, f"rank {rank}")):
        where = f"rank {rank}, span {position}"
        try:
            row.append(_span(cell, rank, placement))
        except UsageError as error:
            raise UsageError(f"{where}: {error}") from None
        if len(row) > 1 and row[-1].start < row[-2].start:
            raise UsageError(f"{where}: {row[-1].action} starts before {row[-2].action}: sort spans by start")
    return tuple(row)


def _span(cell: object, rank: int, placement: Placement) -> Span:
    if not isinstance(cell, list) or len(cell) not in (3, 4):
        raise UsageError(f'{cell!r} is not a span: write it like ["0F0", 0.0, 1.0]')
    action, *partner = (Action.parse(str(text)) for text in (cell[0], *cell[3:]))
    start, end = (_number(time, "a time") for time in cell[1:3])  # negative where a rank starts before rank 0
    if action.stage not in placement.stages_of(rank):
        raise UsageError(f"{action} cannot run here: the rank holds {_stages(placement.stages_of(rank))}")
    if end < start:
        raise UsageError(f"{action} ends at {end}, before its start at {start}")
    return Span(action, rank, start, end, *partner)


def _stages(stages: tuple[int, ...]) -> str:
    return f"stage{'s' * (len(stages) > 1)} {', '.join(map(str, stages))}"


def _bytes(fields: dict[str, Any], name: str, placement: Placement) -> tuple[float, ...]:
    numbers = tuple(_number(each, name) for each in _list(fields.get(name, []), name))
    if any(number < 0 for number in numbers):
        raise UsageError(f"{name} must not be negative, got {min(numbers)}")
    if len(numbers) not in (0, placement.num_stages):
        raise UsageError(f"{name}: there are {len(numbers)} for {placement.num_stages} stages")
    return numbers


def _factors(value: object, rows: tuple[Row, ...]) -> tuple[float, ...]:
    numbers = tuple(_number(each, "microbatch_factors") for each in _list(value, "microbatch_factors"))
    if any(number < 0 for number in numbers):
        raise UsageError(f"microbatch_factors must not be negative, got {min(numbers)}")
    many = max((span.action.microbatch + 1 for row in rows for span in row), default=0)
    if numbers and len(numbers) < many:
        raise UsageError(f"microbatch_factors: there are {len(numbers)} for {many} microbatches")
    return numbers


def _kept_bytes(value: object, placement: Placement) -> dict[Content, tuple[float, ...]]:
    if not isinstance(value, dict):
        raise UsageError(f"kept_bytes: {value!r} is not an object")
    if unknown := sorted(set(value) - set(Content)):
        raise UsageError(f"kept_bytes: there is no content {', '.join(unknown)}; known: {', '.join(Content)}")
    return {Content(name): _bytes(value, name, placement) for name in value}


def _list(value: object, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise UsageError(f"{where}: {value!r} is not a list")
    return value


def _whole(value: object, where: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise UsageError(f"{where}: {value!r} is not the number of a rank")
    return value


def _number(value: object, where: str) -> float:
    found = number(value, where)
    if abs(found) > LARGEST:
        raise UsageError(f"{where} must be at most {LARGEST:g}, got {value!r}")
    return found
