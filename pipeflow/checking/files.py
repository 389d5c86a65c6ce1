"""The file of a recording: a rank's events, one JSON object a line, so that a crash costs the last line alone. Numbers
of arrays are float64 in base64. Reading checks every field and runs nothing; it needs no torch.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from pipeflow.core.errors import UsageError

FORMAT = 1
Array = NDArray[np.float64]
Event = dict[str, Any]
_NAME = re.compile(r"rank-(\d{1,6})\.jsonl")
_MOST = 2**31  # numbers of one array: more is no recording


def file_of(folder: Path, rank: int) -> Path:
    """The file of a rank in the folder of a recording."""
    return folder / f"rank-{rank:05}.jsonl"


def line_of(event: Mapping[str, object], arrays: Mapping[str, Array]) -> str:
    """The line of an event with its arrays."""
    packed = {
        name: {"shape": array.shape, "float64": base64.b64encode(array.astype("<f8").tobytes()).decode()}
        for name, array in arrays.items()
    }
    return json.dumps({**event, **packed}) + "\n"


def read_events(path: Path) -> list[Event]:
    """The events of a file, with their arrays. The first has the kind "start", the last "end".

    Raises UsageError for a file that is missing, damaged or cut off.
    """
    events: list[Event] = []
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if not line.endswith("\n"):
                    break  # the process ended while it wrote this line
                events.append(_event(path, number, line))
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from error
    if not events or events[0]["kind"] != "start":
        raise UsageError(
            f"{path} is no recording: its first line does not start one; make it with pipeflow.checking.record"
        )
    if events[0].get("format") != FORMAT:
        raise UsageError(f"{path} has format {events[0].get('format')!r}, not {FORMAT}: record it again")
    if events[-1]["kind"] != "end":
        steps = sum(event["kind"] == "stepped" for event in events)
        raise UsageError(
            f"{path} was cut off after {steps} whole steps: its run did not leave the with block of record"
        )
    return events


def _event(path: Path, number: int, line: str) -> Event:
    try:
        event = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise _damaged(path, number, str(error)) from error
    if not isinstance(event, dict) or not isinstance(event.get("kind"), str):
        raise _damaged(path, number, "it is no event")
    for name, value in event.items():
        if isinstance(value, dict) and set(value) == {"shape", "float64"}:
            event[name] = _array(path, number, value)
    return event


def _array(path: Path, number: int, packed: Mapping[str, Any]) -> Array:
    shape, text = packed["shape"], packed["float64"]
    whole = isinstance(shape, list) and all(type(size) is int and size >= 0 for size in shape)
    if not whole or not isinstance(text, str) or prod(shape) > _MOST:
        raise _damaged(path, number, "an array has no shape")
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise _damaged(path, number, str(error)) from error
    if len(data) != 8 * prod(shape):
        raise _damaged(path, number, f"an array of shape {shape} has {len(data)} bytes")
    return np.frombuffer(data, "<f8").reshape(shape).astype(np.float64)


def _damaged(path: Path, number: int, why: str) -> UsageError:
    return UsageError(f"{path}, line {number} is damaged: {why}; record it again")


def rank_files(folder: Path) -> Iterator[tuple[int, Path]]:
    """The files of a recording's ranks, in order.

    Raises UsageError if there is none.
    """
    if not folder.is_dir():
        raise UsageError(f"{folder} is no folder: name one that pipeflow.checking.record wrote")
    found = sorted((int(named[1]), path) for path in folder.iterdir() if (named := _NAME.fullmatch(path.name)))
    if not found:
        raise UsageError(f"{folder} has no recording: pipeflow.checking.record writes a file rank-00000.jsonl there")
    yield from found


def misread(path: Path, event: Event, why: str) -> NoReturn:
    """Raises UsageError for an event that lacks something."""
    raise UsageError(f"{path}: an event {event['kind']!r} {why}; record it again")
