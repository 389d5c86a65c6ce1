"""Formats besides Chrome traces, written here as their documents say; nothing was recorded with these tools."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from pipeflow.core.action import Kind
from pipeflow.core.errors import UsageError
from pipeflow.core.timeline import Timeline
from pipeflow.schedules import make_schedule
from tests.traces.recording import Machine, explain, ran

NANO = 1e9
TIMELINE = ran(make_schedule("1f1b", ranks=4, microbatches=6), Machine(slow={1: 1.5}))


def attributes(**given: object) -> list[dict[str, Any]]:
    """Attributes as OTLP's JSON has them."""
    kinds = {int: "intValue", str: "stringValue"}
    return [{"key": key.replace("__", "."), "value": {kinds[type(value)]: value}} for key, value in given.items()]


def otlp(timeline: Timeline, *, microbatches: bool = True, tensor: int = 2) -> list[dict[str, Any]]:
    """A resource per process: each pipeline rank has several tensor ranks."""
    found = []
    for rank, row in enumerate(timeline.rows):
        for tensor_rank in range(tensor):
            spans = []
            for span in row:
                word = "forward" if span.action.kind is Kind.F else "backward"
                own = {"megatron__microbatch_id": span.action.microbatch} if microbatches else {}
                spans.append(
                    {
                        "name": f"megatron.microbatch.{word}",
                        "startTimeUnixNano": str(int(span.start * NANO)),
                        "endTimeUnixNano": str(int(span.end * NANO)),
                        "attributes": attributes(**own),
                    }
                )
            spans.append({"name": "megatron.train_step", "startTimeUnixNano": "0", "endTimeUnixNano": "9" * 10})
            process = attributes(
                dl__pipeline_parallel__rank=rank, dl__pipeline_parallel__size=4, dl__rank=rank * tensor + tensor_rank
            )
            found.append({"resource": {"attributes": process}, "scopeSpans": [{"spans": spans}]})
    return found


def require_explained(found: Any) -> None:
    assert found.names[0] == "1f1b"
    assert found.timeline.makespan == pytest.approx(TIMELINE.makespan, rel=1e-3)
    assert (found.findings[0].kind, found.findings[0].where) == ("slow stage", 1)


@pytest.mark.parametrize("microbatches", [True, False])
def test_spans_of_open_telemetry(microbatches: bool, tmp_path: Path) -> None:
    path = tmp_path / "spans.json"
    path.write_text(json.dumps({"resourceSpans": otlp(TIMELINE, microbatches=microbatches)}), encoding="utf-8")
    require_explained(explain([path]))


def test_spans_in_lines_of_which_the_last_one_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "spans.jsonl"
    lines = [json.dumps({"resourceSpans": [each]}) for each in otlp(TIMELINE)]
    path.write_text("\n".join([*lines, lines[0][:40]]), encoding="utf-8")
    require_explained(explain([path]))


def test_spans_without_a_rank_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "spans.json"
    [first, *_] = otlp(TIMELINE)
    path.write_text(json.dumps({"resourceSpans": [first | {"resource": {}}]}), encoding="utf-8")
    with pytest.raises(UsageError, match=r"none of the attributes dl\.pipeline_parallel\.rank, dl\.rank, which say"):
        explain([path])


def nsight(path: Path, timeline: Timeline, rank: int, *, kernels: bool) -> None:
    """An export: ranges that begin before their kernels, which are launched early and end late."""
    connection = sqlite3.connect(path)
    run = connection.execute
    run("CREATE TABLE StringIds (id INTEGER, value TEXT)")
    run("CREATE TABLE NVTX_EVENTS (start INTEGER, end INTEGER, text TEXT, textId INTEGER)")
    names = {"gemm": 1, "ncclSend": 2, "forward_step": 3, "backward_step": 4}
    connection.executemany("INSERT INTO StringIds VALUES (?, ?)", [(value, key) for key, value in names.items()])
    if kernels:
        run("CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start INTEGER, correlationId INTEGER)")
        columns = "start INTEGER, end INTEGER, correlationId INTEGER, shortName INTEGER"
        run(f"CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL ({columns})")
    for number, span in enumerate(timeline.rows[rank]):
        start, end = int(span.start * NANO), int(span.end * NANO)
        word = "forward_step" if span.action.kind is Kind.F else "backward_step"
        host = (number * 1000, number * 1000 + 900) if kernels else (start, end)  # the host is far ahead of the device
        run("INSERT INTO NVTX_EVENTS VALUES (?, ?, NULL, ?)", (*host, names[word]))
        if kernels:
            for part, name in enumerate((1, 1, 2)):
                run("INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (?, ?)", (host[0] + part, 3 * number + part))
                times = [(start, (start + end) // 2), ((start + end) // 2, end), (end, end + 10**7)][part]
                run("INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (?, ?, ?, ?)", (*times, 3 * number + part, name))
    connection.commit()
    connection.close()


@pytest.mark.parametrize("kernels", [False, True])
def test_exports_of_nsight_systems(kernels: bool, tmp_path: Path) -> None:
    for rank in range(4):
        nsight(tmp_path / f"report.rank{rank}.sqlite", TIMELINE, rank, kernels=kernels)
    require_explained(explain([tmp_path]))


@pytest.mark.parametrize(
    "schema",
    [
        "VIEW StringIds AS WITH RECURSIVE r(id) AS (SELECT 1 UNION ALL SELECT id FROM r) SELECT id, '' value FROM r",
        "VIEW stringids AS SELECT 1 id, 'PP:0F0' value",
        "TABLE StringIds (id INTEGER, value TEXT AS (hex(zeroblob(id))))",
        "VIRTUAL TABLE StringIds USING fts4(id, value)",
    ],
)
def test_a_table_of_nsight_whose_rows_are_computed_is_refused(schema: str, tmp_path: Path) -> None:
    nsight(path := tmp_path / "rank0.sqlite", TIMELINE, 0, kernels=False)
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("DROP TABLE StringIds")
        connection.execute(f"CREATE {schema}")
        connection.commit()
    with pytest.raises(UsageError, match="no export of Nsight Systems: StringIds is computed, not stored"):
        explain([path])


def test_a_join_that_is_much_larger_than_its_tables_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeflow.tools.traces.nsight.LEAST", 0)
    nsight(path := tmp_path / "rank0.sqlite", TIMELINE, 0, kernels=False)
    with closing(sqlite3.connect(path)) as connection:
        for table, values in (("StringIds", "1, 'gemm'"), ("NVTX_EVENTS", "1, 2, NULL, 1")):
            numbers = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n LIMIT 800)"
            connection.execute(f"INSERT INTO {table} {numbers} SELECT {values} FROM n")
        connection.commit()
    with pytest.raises(UsageError, match="its tables have far more rows together than its size has room for"):
        explain([path])


def test_a_row_of_nsight_that_fills_the_memory_is_refused(tmp_path: Path) -> None:
    nsight(path := tmp_path / "rank0.sqlite", TIMELINE, 0, kernels=False)
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("INSERT INTO NVTX_EVENTS VALUES (1, 2, zeroblob(3000000), 1)")
        connection.commit()
    with pytest.raises(UsageError, match="no export of Nsight Systems: string or blob too big"):
        explain([path])


def test_an_interrupt_ends_a_query(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nsight(path := tmp_path / "rank0.sqlite", TIMELINE, 0, kernels=False)

    def interrupted(_: object) -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr("pipeflow.tools.traces.nsight.AT_ONCE", 1)
    monkeypatch.setattr("pipeflow.tools.traces.nsight._QueryLimit.__call__", interrupted)
    with pytest.raises(KeyboardInterrupt):
        explain([path])


def test_what_is_no_export_of_nsight_is_refused(tmp_path: Path) -> None:
    empty, other = tmp_path / "rank0.sqlite", tmp_path / "other.sqlite"
    with closing(sqlite3.connect(empty)) as connection:
        connection.execute("CREATE TABLE Things (id INTEGER)")
    other.write_bytes(b"not a database, but long enough to be read as one" * 20)
    with pytest.raises(UsageError, match="it has no NVTX ranges: record with `nsys profile --trace=cuda,nvtx`"):
        explain([empty])
    with pytest.raises(UsageError, match="this is no export of Nsight Systems"):
        explain([other])
    with pytest.raises(UsageError, match=r"No such file or directory; did you mean .*other\.sqlite"):
        explain([tmp_path / "others.sqlite"])
