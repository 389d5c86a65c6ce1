"""Execution traces of MLCommons Chakra: nodes as JSON, as torch writes them and `chakra_trace_link` adds times to them,
or as the protobuf messages of `et_def.proto`. Must not contain: what events mean.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from pipeflow.core.errors import UsageError
from pipeflow.tools.traces.events import RankEvents, count, objects, text
from pipeflow.tools.traces.json_traces import collected

USER_SCOPE = 7  # torch's record scope of annotations
NO_TIMES = (
    "its nodes have no times, which torch's ExecutionTraceObserver does not record: add those of torch.profiler with "
    "chakra_trace_link, or give the trace of torch.profiler alone"
)
VARINT, LENGTH = 0, 2  # wire types of protobuf
MOST, NODE_FIELDS = 2**22, 8  # fields of a file, so that none can fill the memory; those that a node counts for
SIZES = {1: 8, 5: 4}  # bytes of those that have a fixed size
NODE = {1: "id", 2: "name", 4: "ctrl_deps", 6: "ts", 7: "inclusive_dur", 10: "attrs"}
NUMBERS, TEXT = (7, 9, 11, 13, 27), 29  # fields of an attribute with an integer or truth value, and with a text

Node = dict[str, Any]


def read_chakra_json(whole: str, source: str) -> RankEvents:
    """The events of a rank in a JSON trace. Raises UsageError for a file that is cut off, or has no times."""
    try:
        found = json.loads(whole)
    except (ValueError, RecursionError):
        raise UsageError(f"{source}: this execution trace is cut off or damaged: record it again") from None
    return _events(objects(found, "nodes"), source)


def read_chakra(data: bytes, source: str) -> RankEvents:
    """The events of a rank in a protobuf trace: messages, each after its length, of which the first is none of a node.
    Of a file that is cut off, what is there. Raises UsageError for another file, and for a trace without times.
    """
    nodes: list[Node] = []
    is_cut_off = False
    try:
        counted = [0]
        nodes += (_node(each, counted) for each in _Fields(data, counted).messages())
    except EOFError:
        is_cut_off = True
    except OverflowError:
        raise UsageError(f"{source}: this has more than {MOST} fields: record fewer steps") from None
    except ValueError:
        nodes = []
    if not nodes:
        raise UsageError(f"{source}: this is no execution trace of Chakra")
    found = _events(nodes[1:], source)
    found.is_cut_off = is_cut_off
    return found


def _events(nodes: list[Node], source: str) -> RankEvents:
    if not any(node.get("ts") for node in nodes):
        raise UsageError(f"{source}: {NO_TIMES}")
    return collected(_raw_events(nodes), source)


def _raw_events(nodes: list[Node]) -> Iterator[dict[str, Any]]:
    """The nodes as events of a Chrome trace. A node of a device was launched by the node that it depends on."""
    devices: list[tuple[Node, int | None]] = []
    starts: dict[int | None, object] = {}
    for node in nodes:
        own = {text(each.get("name")): each.get("value") for each in objects(node, "attrs")}
        name, number = node.get("name"), own.get("seq_id")
        times = {"ts": node.get("ts"), "dur": node.get("inclusive_dur", node.get("dur", 0))}
        if node.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset") or own.get("is_cpu_op") == 0:
            deps = node.get("ctrl_deps")
            parent = count(deps[0] if isinstance(deps, list) and deps else deps)
            devices.append(({"cat": node.get("cat") or "kernel", "name": name, **times}, parent))
            continue
        starts[count(node.get("id"))] = node.get("ts")
        category = "user_annotation" if own.get("scope") == USER_SCOPE else "cpu_op"
        args = {"Sequence number": number, "Fwd thread id": own.get("fw_tid")}
        yield {"ph": "X", "cat": category, "name": name, **times, "args": args}
    for number, (node, parent) in enumerate(devices):
        args = {"correlation": number}
        if parent in starts:
            yield {"ph": "X", "cat": "cuda_runtime", "ts": starts[parent], "args": args}
        yield {"ph": "X", **node, "args": args}


def _node(data: bytes, counted: list[int]) -> Node:
    found: dict[str, Any] = {"attrs": []}
    for field, value in _Fields(data, counted).fields():
        key = NODE.get(field)
        if key == "attrs":
            if attribute := _attribute(value, counted):
                found[key].append(attribute)
        elif key == "name":
            found[key] = _decoded(value)
        elif key == "ctrl_deps" and isinstance(value, bytes):  # packed: several numbers, of which the first counts
            found[key] = _Fields(value, counted).first_number()
        elif key is not None:
            found[key] = value
    return found


def _attribute(value: object, counted: list[int]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for field, each in _Fields(value if isinstance(value, bytes) else b"", counted).fields():
        if field == 1:
            found["name"] = _decoded(each)
        elif field in NUMBERS or field == TEXT:
            found["value"] = _decoded(each) if field == TEXT else each
    return found


def _decoded(value: object) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else ""


class _Fields:
    """Reads protobuf's encoding. Raises EOFError where the data ends too early, ValueError for what is none, and
    OverflowError for too many fields, of which all parts of a file count together in `counted`.
    """

    def __init__(self, data: bytes, counted: list[int]) -> None:
        self._data, self._place, self._counted = data, 0, counted

    def _count(self, fields: int = 1) -> None:
        self._counted[0] += fields
        if self._counted[0] > MOST:
            raise OverflowError

    def messages(self) -> Iterator[bytes]:
        """Messages, each after its length."""
        while self._place < len(self._data):
            self._count(NODE_FIELDS)
            yield self._taken(self._varint())

    def first_number(self) -> int | None:
        """The first number of a packed field; None if it has none."""
        return self._varint() if self._data else None

    def fields(self) -> Iterator[tuple[int, int | bytes]]:
        """The fields of a message: their numbers and values, those of a fixed size as bytes."""
        while self._place < len(self._data):
            self._count()
            key = self._varint()
            field, wire = key >> 3, key & 7
            if wire == VARINT:
                yield field, self._varint()
            elif wire in SIZES or wire == LENGTH:
                yield field, self._taken(SIZES.get(wire) or self._varint())
            else:
                raise ValueError("no wire type of protobuf")

    def _taken(self, size: int) -> bytes:
        self._place += size
        if self._place > len(self._data):
            raise EOFError
        return self._data[self._place - size : self._place]

    def _varint(self) -> int:
        """A number; those with the highest bit are negative."""
        value = 0
        for shift in range(0, 70, 7):
            if self._place >= len(self._data):
                raise EOFError
            byte = self._data[self._place]
            self._place += 1
            value |= (byte & 127) << shift
            if byte < 128:
                return value - (1 << 64) if value >> 63 == 1 else value
        raise ValueError("no number")
