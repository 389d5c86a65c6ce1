"""Traces of Nsight Systems, as `nsys export --type sqlite` writes them: NVTX ranges, and the kernels launched inside of
them. Must not contain: what ranges mean.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path

from pipeflow.core.errors import UsageError
from pipeflow.traces.events import Event, RankEvents

RANGES = """
    SELECT coalesce(e.text, s.value), e.start, e.end
    FROM NVTX_EVENTS e LEFT JOIN StringIds s ON s.id = e.textId
    WHERE e.end IS NOT NULL
"""
KERNELS = """
    SELECT r.start, s.value, k.start, k.end
    FROM CUPTI_ACTIVITY_KIND_KERNEL k
    JOIN CUPTI_ACTIVITY_KIND_RUNTIME r ON r.correlationId = k.correlationId
    LEFT JOIN StringIds s ON s.id = k.shortName
"""
SECOND = 1e-9  # times are in nanoseconds


def read_nsight(path: Path) -> RankEvents:
    """The events of one rank. Raises UsageError for a file that is no export of Nsight Systems, or has no ranges."""
    found = RankEvents(str(path))
    connection = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
    try:
        tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        if "NVTX_EVENTS" not in tables:
            raise UsageError(f"{path}: it has no NVTX ranges: record with `nsys profile --trace=cuda,nvtx`")
        for name, start, end in connection.execute(RANGES):
            found.ranges.append(Event(str(name or ""), SECOND * start, SECOND * end))
        if {"CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_RUNTIME"} <= tables:
            found.kernels.extend(_kernels(connection))
    except sqlite3.DatabaseError as error:
        raise UsageError(f"{path}: this is no export of Nsight Systems: {error}") from None
    finally:
        connection.close()
    return found


def _kernels(connection: sqlite3.Connection) -> Iterator[tuple[float, Event]]:
    for launched, name, start, end in connection.execute(KERNELS):
        if not str(name).startswith("nccl"):
            yield SECOND * launched, Event(str(name), SECOND * start, SECOND * end)
