"""Files that are forged or damaged: each is explained, or refused with one sentence, whatever is in it."""

from __future__ import annotations

import gzip
import json
import os
import random
import zlib
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from pipeflow.core.errors import PipeflowError
from pipeflow.schedules import make_schedule
from pipeflow.tools.traces import action_names, chakra, explanation, files, json_traces, rebuild
from tests.traces.recording import explain, ran, record
from tests.traces.test_chakra import TIMELINE, written
from tests.traces.test_formats import nsight, otlp
from tests.traces.test_jobs import step_of_rank
from tests.traces.test_jobs import written as written_job

ODD: list[Any] = [
    *(None, True, -1, 0, 2**70, 1e308, float("nan"), float("inf"), "", "3", "\x1b[2J", "PP:0F0", "PP:9F99"),
    *([], [[]], [None], {}, {"a": 1}, {"value": None}),
]


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every holder in a value, with each of its keys."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in list(items):
        yield value, key
        yield from places(each)


@pytest.fixture(autouse=True)
def few_orders(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the search try few orders, since it is not what is tested."""
    monkeypatch.setattr(explanation, "ORDERS", 0)


def is_refused(folder: Path) -> bool:
    """Whether a folder is refused, with one sentence, rather than explained."""
    said = ""
    try:
        assert min(explanation.explain([folder]).step_seconds) >= 0
    except PipeflowError as error:
        said = str(error)
    assert not {"\n", "\x1b"} & set(said), said
    return bool(said)


def files_of(folder: Path, kind: str) -> None:
    match kind:
        case "chrome":
            record(folder, ran(make_schedule("1f1b", ranks=2, microbatches=3)), groups=True, marks=True)
        case "job":
            folder.mkdir()
            written_job(folder, *(step_of_rank(computes, 41 - computes) for computes in (10, 36)))
        case "chakra":
            written(folder, ran(make_schedule("1f1b", ranks=2, microbatches=3)), device=True)
        case "otlp":
            folder.mkdir()
            (folder / "spans.json").write_text(json.dumps({"resourceSpans": otlp(TIMELINE)}), encoding="utf-8")


@pytest.mark.slow  # a second each
@pytest.mark.parametrize("kind", ["chrome", "job", "chakra", "otlp"])
def test_values_that_nobody_expects(kind: str, tmp_path: Path) -> None:
    files_of(tmp_path / "traces", kind)
    path = min((tmp_path / "traces").iterdir())
    text, refused = path.read_text(encoding="utf-8"), 0
    for seed in range(60):
        chance, whole = random.Random(seed), json.loads(text)
        for _ in range(chance.choice([1, 1, 5, 50])):
            holder, key = chance.choice(list(places(whole)))
            holder[key] = deepcopy(chance.choice(ODD))
        path.write_text(json.dumps(whole), encoding="utf-8")
        refused += is_refused(tmp_path / "traces")
    assert 0 < refused < 60


@pytest.mark.parametrize("protobuf", [True, False])
def test_bytes_that_nobody_expects(protobuf: bool, tmp_path: Path) -> None:
    timeline = ran(make_schedule("1f1b", ranks=2, microbatches=3))
    if protobuf:
        written(tmp_path / "traces", timeline, protobuf=True)
    else:
        (tmp_path / "traces").mkdir()
        for rank in range(2):
            nsight(tmp_path / "traces" / f"rank{rank}.sqlite", timeline, rank, kernels=True)
    path = min((tmp_path / "traces").iterdir())
    data, refused = path.read_bytes(), 0
    for seed in range(60):
        chance, changed = random.Random(seed), bytearray(data)
        for _ in range(chance.choice([1, 5, 200])):
            changed[chance.randrange(len(changed))] = chance.randrange(256)
        path.write_bytes(changed[: chance.choice([len(changed), chance.randrange(len(changed))])])
        refused += is_refused(tmp_path / "traces")
    assert refused


def test_what_is_nested_without_end_is_cut_off(tmp_path: Path) -> None:
    (tmp_path / "rank0.json").write_text('{"traceEvents": [' + "[" * 200_000, encoding="utf-8")
    with pytest.raises(PipeflowError, match="it has no annotation and no operator"):
        explain([tmp_path])
    (tmp_path / "rank0.json").write_text('{"resourceSpans": [' + "[" * 200_000, encoding="utf-8")
    with pytest.raises(PipeflowError, match="no spans"):
        explain([tmp_path])


@pytest.mark.parametrize("fills", [b" ", b"0", b'{"ph": 1},'])
def test_a_small_file_does_not_fill_the_memory(fills: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "FREE", 1 << 20)
    monkeypatch.setattr(files, "PART", 1 << 16)
    packer = zlib.compressobj(wbits=31)
    (tmp_path / "rank0.json.gz").write_bytes(packer.compress(b"[" + fills * (2 << 20)) + packer.flush())
    with pytest.raises(PipeflowError, match=r"rank0.json.gz: unpacked, this has more than 1 MiB: record fewer steps"):
        explain([tmp_path])


def test_what_is_no_file_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "rank0.json")
    for path in (tmp_path, tmp_path / "rank0.json"):
        with pytest.raises(PipeflowError, match=r"rank0.json: this is no file: give a trace, or a folder of traces"):
            explain([path])


def test_events_without_a_time_are_counted(tmp_path: Path) -> None:
    folder = record(tmp_path / "traces", ran(make_schedule("1f1b", ranks=2, microbatches=4)))
    whole = json.loads((folder / "rank1.json").read_text(encoding="utf-8"))
    some = whole["traceEvents"][0]
    for odd in ({"ts": float("nan")}, {"dur": -5}, {"ts": "soon"}):
        whole["traceEvents"].append(some | odd)
    (folder / "rank1.json").write_text(json.dumps(whole), encoding="utf-8")
    found = explain([folder])
    assert found.notes == ("events are left out that have no time, or end before they start: 3",)
    assert found.names[0] == "1f1b"


def test_of_a_file_that_ends_in_its_only_step_no_order_is_told(tmp_path: Path) -> None:
    folder = record(tmp_path / "traces", ran(make_schedule("1f1b", ranks=2, microbatches=4)))
    path = folder / "rank1.json"
    path.write_text(path.read_text(encoding="utf-8")[: path.stat().st_size // 2], encoding="utf-8")
    with pytest.raises(PipeflowError, match=r"rank1.json is cut off, and no step is whole before its end: record"):
        explain([folder])


def test_members_of_gzip_without_content_take_no_time(tmp_path: Path) -> None:
    folder = record(tmp_path / "traces", ran(make_schedule("1f1b", ranks=2, microbatches=4)))
    whole = gzip.compress((folder / "rank1.json").read_bytes())
    (folder / "rank1.json").unlink()
    (folder / "rank1.json.gz").write_bytes(gzip.compress(b"") * 1000 + whole)
    assert explain([folder]).names[0] == "1f1b"


@pytest.mark.parametrize("name", ["rank0.json", "rank0.json.gz", "rank0.et"])
def test_a_file_that_is_too_large_is_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "LARGEST", 1 << 20)
    whole = b"[" + b" " * (2 << 20)
    (tmp_path / name).write_bytes(gzip.compress(whole, 0) if name.endswith("gz") else whole)
    with pytest.raises(PipeflowError, match=f"{name}: unpacked, this has more than 1 MiB: record fewer steps"):
        explain([tmp_path])


def test_more_events_and_actions_than_can_be_explained_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = record(tmp_path / "traces", ran(make_schedule("1f1b", ranks=2, microbatches=4)))
    for where in (rebuild, action_names):
        monkeypatch.setattr(where, "MOST", 10)
    with pytest.raises(PipeflowError, match="more than 10 actions were recorded: record fewer steps, or microbatches"):
        explain([folder])
    monkeypatch.setattr(json_traces, "MOST", 10)
    with pytest.raises(PipeflowError, match=r"rank0.json: this has more than 10 events: record fewer steps"):
        explain([folder])


def test_an_empty_file_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "rank0.json").symlink_to("/proc/self/status")  # such files are empty, though some never end
    with pytest.raises(PipeflowError, match=r"rank0.json: this file is empty: record the steps again"):
        explain([tmp_path])


def test_a_stage_that_cannot_be_there_is_refused(tmp_path: Path) -> None:
    timeline = ran(make_schedule("1f1b", ranks=2, microbatches=2))
    folder = record(tmp_path / "traces", timeline, name=lambda action, _: f"PP:99999999{action}")
    with pytest.raises(PipeflowError, match="8 actions are too few for a stage 999999991"):
        explain([folder])


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        ("(?P<kind>(a+)+)+$", r"takes too long: it may match in too many ways$"),
        ("(" * 5000 + "(?P<kind>a)" + ")" * 5000, "is not a regular expression"),
        ("(?P<kind>a){4294967296}", "is not a regular expression"),
    ],
)
def test_a_pattern_that_never_ends_or_is_none_is_refused(
    pattern: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(action_names, "PATIENCE", 0.2)
    folder = record(
        tmp_path / "traces", ran(make_schedule("1f1b", ranks=2, microbatches=2)), name=lambda _, __: "a" * 40 + "!"
    )
    with pytest.raises(PipeflowError, match=said):
        explain([folder], names=pattern)


def test_fields_without_end_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chakra, "MOST", 1000)
    for data in (bytes(1000), b"\x00\xc8\x13" + b"\x52\x00" * 1252):  # empty nodes; one with empty attributes
        (tmp_path / "rank0.et").write_bytes(data)
        with pytest.raises(PipeflowError, match=r"rank0.et: this has more than 1000 fields: record fewer steps"):
            explain([tmp_path])
