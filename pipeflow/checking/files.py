"""The files of a recording, written and read. A rank's events are one JSON object a line, so that a crash costs the
last line alone. Numbers of arrays are float64 in base64. Reading checks every field and runs nothing, without torch.
"""

from __future__ import annotations

import base64
import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from pipeflow.core.errors import UsageError
from pipeflow.core.files import opened

FORMAT = 2
Array = NDArray[np.float64]
Event = dict[str, Any]
_NAME = re.compile(r"rank-(\d{1,6})\.jsonl")
_BEGIN, _END = b'{"kind": "start", ', b'\n{"kind": "end", '
_LONGEST, _PART = 2**33, 2**20  # bytes of a line, more is no recording; bytes of it that are read at once
_MOST_DIMS, _MOST_SIZE = 32, 2**40  # of a tensor: more is no recording
MOST_ROWS = 2048  # of one output, so that a file stays small: the rows of longer ones are added up
INSIDE, INPUT = ": ", "input"  # "MODULE: FUNCTION #1" is within a module, "MODULE: input" what it is given
MOST_TENSORS = 4  # of one output or batch: more are states, such as caches of keys and values


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
    with opened(path) as file:
        events = [_event(path, number, line) for number, line in enumerate(_lines(path, file), 1)]
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


def _lines(path: Path, file: BinaryIO) -> Iterator[bytes]:
    """The lines up to one without an end, which is not loaded: the process ended while it wrote it."""
    while line := file.readline(_PART):
        start, part = file.tell() - len(line), line
        while part and not part.endswith(b"\n"):
            part = file.readline(_PART)
            if file.tell() - start > _LONGEST:
                raise UsageError(f"{path} has a line of more than {_LONGEST >> 30} GiB: record less of it whole")
        if not part:
            return
        if part is not line:
            size = file.tell() - start
            file.seek(start)
            line = file.read(size)
        yield line


def _event(path: Path, number: int, line: bytes) -> Event:
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
    if not _is_sizes(shape) or not isinstance(text, str):
        raise _damaged(path, number, "an array has no shape")
    try:
        data = base64.b64decode(text, validate=True)
        if len(data) != 8 * prod(shape):
            raise ValueError(f"an array of shape {shape} has {len(data)} bytes")
        return np.frombuffer(data, "<f8").reshape(shape).astype(np.float64)
    except ValueError as error:
        raise _damaged(path, number, str(error)) from error


def _damaged(path: Path, number: int, why: str) -> UsageError:
    return UsageError(f"{path}, line {number} is damaged: {why}; record it again")


def rank_files(folder: Path) -> Iterator[tuple[int, Path]]:
    """The files of a recording's ranks, in order.

    Raises UsageError if there is none.
    """
    if not folder.is_dir():
        raise UsageError(f"{folder} is no folder: name one that pipeflow.checking.record wrote")
    found = files_of(folder)
    if not found:
        raise UsageError(f"{folder} has no recording: pipeflow.checking.record writes a file rank-00000.jsonl there")
    yield from found


def files_of(folder: Path) -> list[tuple[int, Path]]:
    """The files in a folder that have the names of a recording's, with their ranks, in order."""
    return sorted((int(named[1]), path) for path in folder.iterdir() if (named := _NAME.fullmatch(path.name)))


def is_recording(path: Path) -> bool:
    """True if a file begins as a recording does, or is empty, as one whose run was killed."""
    if path.is_symlink() or not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(_BEGIN)) in (_BEGIN, b"")


def is_whole(path: Path) -> bool:
    """True if a file ends as a recording does that was not cut off."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 99))
            last = file.read()
    except FileNotFoundError:
        return False
    return _END in last and last.endswith(b"\n")


def misread(path: Path, event: Event, why: str) -> NoReturn:
    """Raises UsageError for an event that lacks something."""
    raise UsageError(f"{path}: an event {event['kind']!r} {why}; record it again")


Blocks = tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
_TENSOR = {"name": str, "sketch": np.ndarray, "dtype": str}
_ROWS = {"place": int, "shape": list, "rows": np.ndarray}
KINDS: dict[str, dict[str, Any]] = {  # the fields that an event must have, and their types
    "before": _TENSOR,
    "after": _TENSOR,
    "gradient": _TENSOR,
    "unclipped": _TENSOR,
    "output": {"module": str, "call": int, "dtype": str, "begin": list, **_ROWS},
    "batch": _ROWS,
    "scalar": {"module": str, "way": str, "place": int, "value": (int, float, np.ndarray)},
    "detached": {"module": str, "where": str},
    "labels": {"rows": np.ndarray, "valid": np.ndarray, "numbers": dict},
    "samples": {"name": str, "microbatch": int, "rows": np.ndarray, "mass": np.ndarray},
    "mass": {"name": str, "mass": np.ndarray},
    "loss": {"value": np.ndarray},
    "norm": {"most": (int, float), "value": np.ndarray},
    "rules": {"rules": dict, "optimizer": str},
    "moment": {"key": str, **_TENSOR},
    "stepped": {"random": str},
}
OPTIONAL = {"again": bool, "function": str, "where": str, "inputs": list, "arguments": dict, "marks": np.ndarray}
WIDTH = 9  # numbers of a sketch and the squared norm
NUMBERS = ("value", "valid", "mass")  # fields that are written as arrays, of which the first entry is meant


class Info(NamedTuple):
    """A parameter or buffer of a rank, as its recording begins.

    Attributes:
        name: the tensor's name.
        shape: of the whole tensor.
        blocks: (offset, shape) of each block that the rank holds.
        stage: its pipeline stage, if the engine said so.
        same: equal for the names of one tied tensor.
        parameter: whether it is trained, rather than a buffer.
        chunk: index of the module that has it, of those that the rank recorded.
    """

    name: str
    shape: tuple[int, ...]
    blocks: Blocks
    stage: int | None
    same: int
    parameter: bool
    chunk: int


Start = tuple[Event, dict[str, Info], list[dict[str, list[Event]]]]


def read_rank(path: Path, rank: int) -> Start:
    """The first event of a rank's file, its tensors by name, and the events of each step by kind.

    Raises UsageError for a file that is missing, damaged or cut off.
    """
    first, *events = read_events(path)
    if first.get("rank") != rank or type(first.get("world")) is not int or not rank < first["world"] <= 10**6:
        misread(path, first, "is not that of this rank")
    tensors = {each.name: each for each in _infos(path, first)}
    modules, groups = first.get("modules"), first.get("groups")
    if not isinstance(modules, list) or not all(map(_is_module, modules)):
        misread(path, first, "has no list of modules")
    if not isinstance(groups, dict) or not all(type(size) is int for size in groups.values()):
        misread(path, first, "has no sizes of groups")
    steps: list[dict[str, list[Event]]] = []
    step: defaultdict[str, list[Event]] = defaultdict(list)
    for event in events[:-1]:
        _check(path, event, tensors)
        event |= {name: float(np.reshape(event[name], -1)[0]) for name in NUMBERS if name in KINDS[event["kind"]]}
        step[event["kind"]].append(event)
        if event["kind"] == "stepped":
            steps.append(dict(step))
            step = defaultdict(list)
    return first, tensors, steps


def _is_module(value: object) -> bool:
    return isinstance(value, dict) and isinstance(value.get("name"), str)


def _infos(path: Path, first: Event) -> Iterator[Info]:
    try:
        for each in first["tensors"]:
            blocks = tuple((tuple(map(int, offset)), tuple(map(int, shape))) for offset, shape in each["offsets"])
            shape, stage = tuple(map(int, each["shape"])), each["stage"]
            if not isinstance(each["name"], str) or not (stage is None or type(stage) is int):
                raise TypeError("a name or a stage")
            if not all(map(_is_sizes, (shape, *(sizes for block in blocks for sizes in block)))):
                raise ValueError("a shape or an offset")
            same, chunk = int(each["same"]), int(each.get("chunk", 0))
            yield Info(each["name"], shape, blocks, stage, same, bool(each["parameter"]), chunk)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        misread(path, first, f"has a tensor that cannot be read ({error!r})")


def _check(path: Path, event: Event, tensors: Mapping[str, Info]) -> None:
    """Raises UsageError for an event that is not as `record` writes it."""
    kind = event["kind"]
    if kind not in KINDS:
        misread(path, event, "is of no known kind")
    for name, wanted in KINDS[kind].items():
        if not isinstance(event.get(name), wanted) or isinstance(event.get(name), bool):
            misread(path, event, f"has no {name!r}")
    for name in ("shape", "begin", "whole"):
        if name in event and not _is_sizes(event[name]):
            misread(path, event, f"has no sizes in {name!r}")
    if "sketch" in event and (event["sketch"].shape != (WIDTH,) or event["name"] not in tensors):
        misread(path, event, "is of no known tensor")
    if "values" in event and not _has_values(event, tensors):
        misread(path, event, "has other values than its tensor")
    rules = [*event.get("rules", {}).values(), event.get("numbers", {})]
    if not all(map(_is_rule, rules)):
        misread(path, event, "has other things than numbers by name")
    if any(name in event and not isinstance(event[name], wanted) for name, wanted in OPTIONAL.items()):
        misread(path, event, "has a field of another kind")
    if not all(isinstance(each, str) for each in event.get("inputs", ())):
        misread(path, event, "has inputs without a name")
    if any(name in event and not np.size(event[name]) for name in (*NUMBERS, "marks")):
        misread(path, event, "has no number")
    if kind in ("batch", "output", "samples") and not _has_rows(event):
        misread(path, event, "has other rows than its shape")
    if _has_negative_squares(event):
        misread(path, event, "has a square below 0")


def _is_rule(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(each, int | float) for each in value.values())


def _has_values(event: Event, tensors: Mapping[str, Info]) -> bool:
    """Whether the values are those of the blocks that the rank has of a tensor, within the tensor; or of an output."""
    if event["kind"] == "output":
        return isinstance(event["values"], np.ndarray) and list(event["values"].shape) == event.get("shape")
    info = tensors.get(str(event.get("name")))
    return (
        info is not None
        and isinstance(event["values"], np.ndarray)
        and event["values"].shape == (sum(prod(shape) for _, shape in info.blocks),)
        and all(
            len(offset) == len(shape) == len(info.shape)
            and all(
                0 <= start <= start + size <= most for start, size, most in zip(offset, shape, info.shape, strict=True)
            )
            for offset, shape in info.blocks
        )
    )


def _has_negative_squares(event: Event) -> bool:
    """Whether a squared norm is below 0: that of a sketch, of a row, or of terms."""
    squares = [event["sketch"][-1]] if "sketch" in event else []
    if event["kind"] in ("batch", "output"):
        squares.append(event["rows"][..., -1])
    return any(np.any(each < 0) for each in (*squares, event.get("mass", 0)))


def _is_sizes(value: object) -> bool:
    return (
        isinstance(value, list | tuple)
        and len(value) <= _MOST_DIMS
        and all(type(size) is int and 0 <= size < _MOST_SIZE for size in value)
    )


def _has_rows(event: Event) -> bool:
    rows, shape = event["rows"], event.get("shape")
    if rows.ndim != 2 or rows.shape[1] != WIDTH - (event["kind"] == "samples"):
        return False
    places = [event[name] for name in ("begin", "whole") if name in event]
    if shape is None:
        return True
    many = shape[0] if shape else 1
    return len(rows) in (1, many) and all(len(place) in (len(shape) - 1, len(shape), 0) for place in places)
