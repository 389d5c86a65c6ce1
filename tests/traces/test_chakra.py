"""Execution traces of Chakra. torch's ExecutionTraceObserver records one here; times are added to its nodes by their
record numbers, as `chakra_trace_link` does. Protobuf messages are written here as `et_def.proto` defines them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeflow.core.errors import UsageError
from pipeflow.core.timeline import Timeline
from pipeflow.schedules import make_schedule
from tests.traces.recording import Machine, explain, ran, record

TIMELINE = ran(make_schedule("1f1b", ranks=4, microbatches=6), Machine(slow={1: 1.5}))


def nodes_of(path: Path, *, device: bool) -> Iterator[dict[str, Any]]:
    """The nodes for the events of a Chrome trace. With `device`, operators ran on a device, and the host was ahead."""
    events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    for number, event in enumerate(events):
        given = event["args"]
        own = {
            "rf_id": number,
            "seq_id": given.get("Sequence number", -1),
            "scope": 7 if event["cat"] == "user_annotation" else 0,
            "fw_tid": given.get("Fwd thread id", 0),
        }
        attributes = [{"name": name, "type": "uint64", "value": value} for name, value in own.items()]
        times = {"ts": event["ts"], "inclusive_dur": event["dur"], "exclusive_dur": event["dur"]}
        node = {"id": 2 * number, "name": event["name"], "ctrl_deps": 1, "attrs": attributes, **times}
        yield node
        if device and event["cat"] == "cpu_op" and not event["name"].startswith("c10d"):
            yield {**node, "id": 2 * number + 1, "cat": "kernel", "name": "gemm", "ctrl_deps": 2 * number, "stream": 7}
            node |= {"inclusive_dur": 1e-3, "exclusive_dur": 1e-3}


def written(folder: Path, *steps: Timeline, protobuf: bool = False, device: bool = False) -> Path:
    record(folder, *steps)
    for path in list(folder.iterdir()):
        nodes = list(nodes_of(path, device=device))
        path.unlink()
        if protobuf:
            path.with_suffix(".et").write_bytes(b"".join(map(sized, [field(1, b"0.0.4"), *map(message, nodes)])))
        else:
            path.write_text(json.dumps({"schema": "1.1.1-chakra.0.0.4", "pid": 1, "nodes": nodes}), encoding="utf-8")
    return folder


def varint(number: int) -> bytes:
    number &= (1 << 64) - 1
    head = bytes([number & 127 | (128 if number > 127 else 0)])
    return head + varint(number >> 7) if number > 127 else head


def field(number: int, value: int | bytes) -> bytes:
    return varint(number << 3) + varint(value) if isinstance(value, int) else varint(number << 3 | 2) + sized(value)


def sized(data: bytes) -> bytes:
    return varint(len(data)) + data


def message(node: dict[str, Any]) -> bytes:
    found = field(1, node["id"]) + field(2, node["name"].encode()) + field(3, 4) + field(4, varint(node["ctrl_deps"]))
    found += field(6, int(node["ts"])) + field(7, int(node["inclusive_dur"]))
    found += varint(12 << 3 | 1) + bytes(8)  # a field that a later version may have
    for each in (*node["attrs"], {"name": "is_cpu_op", "value": "cat" not in node}):
        value = field(27 if isinstance(each["value"], bool) else 9, int(each["value"]))
        found += field(10, field(1, each["name"].encode()) + value)
    return found + field(10, field(1, b"op_schema") + field(29, b"aten::mm"))


@pytest.mark.parametrize("protobuf", [False, True])
@pytest.mark.parametrize("device", [False, True])
def test_execution_traces_are_explained(protobuf: bool, device: bool, tmp_path: Path) -> None:
    found = explain([written(tmp_path / "traces", TIMELINE, protobuf=protobuf, device=device)])
    assert found.names[0] == "1f1b"
    assert found.timeline.makespan == pytest.approx(TIMELINE.makespan, rel=3e-3)  # microseconds, in protobuf
    assert (found.findings[0].kind, found.findings[0].where) == ("slow stage", 1)


def test_messages_that_are_cut_off_give_what_is_there(tmp_path: Path) -> None:
    found = explain([written(tmp_path / "traces", TIMELINE, TIMELINE, protobuf=True)])
    path = tmp_path / "traces" / "rank2.et"
    path.write_bytes(path.read_bytes()[:-40])
    cut = explain([tmp_path / "traces"])
    assert any("rank2.et is cut off" in note for note in cut.notes)
    assert cut.schedule == found.schedule


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        ("rank0.json", b'{"schema": "1.1.1-chakra.0.0.4", "nodes": [{"name": "PP:0F0"}]}', "its nodes have no times"),
        ("rank0.json", b'{"schema": "1.1.1-chakra.0.0.4", "nodes": [{"na', "is cut off or damaged: record it again"),
        ("rank0.et", sized(field(1, b"1")) + sized(field(2, b"PP:0F0")), "its nodes have no times"),
        ("rank0.et", b"\xff" * 40, "this is no execution trace of Chakra"),
        ("rank0.et", b"", "this file is empty: record the steps again"),
    ],
)
def test_execution_traces_without_times_are_refused(name: str, data: bytes, said: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(UsageError, match=said):
        explain([tmp_path / name])


@pytest.mark.exhaustive
@pytest.mark.slow  # it records a step
def test_what_torch_records_is_explained_when_it_has_times(tmp_path: Path) -> None:
    import torch
    from torch.profiler import ExecutionTraceObserver, ProfilerActivity, profile, record_function

    model = torch.nn.Linear(64, 64)
    observer = ExecutionTraceObserver()
    observer.register_callback(str(tmp_path / "host.json"))
    with profile(activities=[ProfilerActivity.CPU], execution_trace_observer=observer) as recorder:
        for microbatch in range(3):
            with record_function(f"PP:0F{microbatch}"):
                loss = model(torch.rand(8, 64)).sum()
            with record_function(f"PP:0B{microbatch}"):
                loss.backward()
    recorder.export_chrome_trace(str(tmp_path / "device.json"))
    with pytest.raises(UsageError, match=r"add those of torch\.profiler with chakra_trace_link, or give the trace"):
        explain([tmp_path / "host.json"])
    events = json.loads((tmp_path / "device.json").read_text(encoding="utf-8"))["traceEvents"]
    times = {(each.get("args") or {}).get("Record function id"): each for each in events if each.get("ph") == "X"}
    whole = json.loads((tmp_path / "host.json").read_text(encoding="utf-8"))
    for node in whole["nodes"]:
        number = next(each["value"] for each in node["attrs"] if each["name"] == "rf_id")
        if number and number in times:
            node |= {"ts": times[number]["ts"], "inclusive_dur": times[number]["dur"]}
    (tmp_path / "linked.json").write_text(json.dumps(whole), encoding="utf-8")
    mine, its = explain([tmp_path / "linked.json"]), explain([tmp_path / "device.json"])
    assert mine.schedule.to_csv() == "0F0,0B0,0F1,0B1,0F2,0B2\n"
    assert mine.timeline.makespan == pytest.approx(its.timeline.makespan, rel=0.02)
