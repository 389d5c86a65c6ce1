"""Traces of Nsight Systems, as `nsys export --type sqlite` writes them: NVTX ranges, and the kernels launched inside of
them. Must not contain: what ranges mean.
"""

from __future__ import annotations

import sqlite3
import stat
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from pipeflow.core.errors import UsageError
from pipeflow.core.files import unreadable
from pipeflow.tools.traces.events import Event, Exchange, RankEvents, is_exchange, seconds

PROCESS = 1 << 24  # Nsight's numbers of threads are those of their processes times this, and more
RANGES = """
    SELECT coalesce(e.text, s.value), e.start, e.end, {process}
    FROM NVTX_EVENTS e LEFT JOIN StringIds s ON s.id = e.textId
    WHERE e.end IS NOT NULL
"""
KERNELS = """
    SELECT s.value, k.start, k.end, {process}, r.start
    FROM CUPTI_ACTIVITY_KIND_KERNEL k
    JOIN CUPTI_ACTIVITY_KIND_RUNTIME r ON r.correlationId = k.correlationId {same}
    LEFT JOIN StringIds s ON s.id = k.shortName
"""
COPIES = """
    SELECT 'Memcpy', k.start, k.end, {process}, r.start
    FROM CUPTI_ACTIVITY_KIND_MEMCPY k
    JOIN CUPTI_ACTIVITY_KIND_RUNTIME r ON r.correlationId = k.correlationId {same}
"""
SECOND = 1e-9  # times are in nanoseconds
TABLES = (
    "NVTX_EVENTS",
    "StringIds",
    "CUPTI_ACTIVITY_KIND_KERNEL",
    "CUPTI_ACTIVITY_KIND_MEMCPY",
    "CUPTI_ACTIVITY_KIND_RUNTIME",
)
LONGEST = 2**20  # bytes of a row
AT_ONCE = 100_000  # instructions of SQLite between two looks at how many there were
LEAST, PER_BYTE = 1_000_000, 8  # instructions that reading may take; that of an export takes about one per byte


def read_nsight(path: Path) -> list[RankEvents]:
    """The events of each process that was recorded, in the order of their numbers. Raises UsageError for a file that is
    no export of Nsight Systems, has no ranges, or takes too long to read for its size.
    """
    found: defaultdict[object, RankEvents] = defaultdict(lambda: RankEvents(str(path)))
    connection, bound = _opened(path)
    try:
        tables = _tables(connection)
        if "NVTX_EVENTS" not in tables:
            raise UsageError(f"{path}: it has no NVTX ranges: record with `nsys profile --trace=cuda,nvtx`")
        process = _process(connection, "NVTX_EVENTS", "e.globalTid")
        for number, event, _ in _events(connection, RANGES.format(process=process)):
            found[number].ranges.append(event)
            found[number].annotations.append(event)
        for table, query in (("CUPTI_ACTIVITY_KIND_KERNEL", KERNELS), ("CUPTI_ACTIVITY_KIND_MEMCPY", COPIES)):
            if not {table, "CUPTI_ACTIVITY_KIND_RUNTIME"} <= tables:
                continue
            process = _process(connection, "CUPTI_ACTIVITY_KIND_RUNTIME", "r.globalTid")
            other = _process(connection, table, "k.globalPid")
            same = "" if "0" in (process, other) else f"AND {process} = {other}"
            for number, event, launched in _events(connection, query.format(process=process, same=same)):
                if is_exchange(event.name):
                    found[number].exchanges.append(Exchange(event, launched))
                else:
                    (found[number].kernels if query is KERNELS else found[number].copies).append((launched, event))
    except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
        if bound.is_reached:
            raise UsageError(f"{path}: its tables have far more rows together than its size has room for") from None
        if str(error) == "interrupted":  # by Ctrl-C in the middle of a query
            raise KeyboardInterrupt from None
        raise UsageError(f"{path}: this is no export of Nsight Systems: {error}") from None
    finally:
        connection.close()
    processes = {number: events for number, events in found.items() if events.ranges}
    return [processes[number] for number in sorted(processes, key=str)] or [RankEvents(str(path))]


class _QueryLimit:
    """Ends a query after so many instructions. SQLite calls it every AT_ONCE of them."""

    def __init__(self, instructions: int) -> None:
        self._left = instructions

    def __call__(self) -> bool:
        self._left -= AT_ONCE
        return self.is_reached

    @property
    def is_reached(self) -> bool:
        return self._left < 0


def _opened(path: Path) -> tuple[sqlite3.Connection, _QueryLimit]:
    """A connection that reads the file, and the bound of its work. Raises UsageError for what is no file."""
    try:
        if not stat.S_ISREG((found := path.stat()).st_mode):
            raise UsageError(f"{path}: this is no file of SQLite")
        connection = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)
    except OSError as error:
        raise unreadable(path, error) from None
    except sqlite3.DatabaseError as error:
        raise UsageError(f"{path}: {error}") from None
    connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, LONGEST)
    connection.text_factory = lambda data: data.decode(errors="replace")
    bound = _QueryLimit(LEAST + PER_BYTE * found.st_size)
    connection.set_progress_handler(bound, AT_ONCE)
    return connection, bound


def _tables(connection: sqlite3.Connection) -> set[str]:
    """Those of TABLES that the file has. Raises sqlite3.DatabaseError for one whose rows are computed, since they may
    have no end.
    """
    found = set()
    query = "SELECT name, type = 'table' AND rootpage > 0 FROM sqlite_master WHERE type IN ('table', 'view')"
    for written, is_stored in connection.execute(query).fetchall():
        for name in TABLES:
            if name.lower() != written.lower():  # SQLite takes them as equal
                continue
            hidden = [row[-1] for row in connection.execute(f"PRAGMA table_xinfo({name})")] if is_stored else [1]
            if any(hidden):
                raise sqlite3.DatabaseError(f"{name} is computed, not stored")
            found.add(name)
    return found


def _process(connection: sqlite3.Connection, table: str, column: str) -> str:
    """SQL for the number of the process; 0 if the table does not have it."""
    columns = {row[1] for row in connection.execute(f"PRAGMA table_info({table})")}
    return f"{column} / {PROCESS}" if column.split(".")[1] in columns else "0"


def _events(connection: sqlite3.Connection, query: str) -> Iterator[tuple[object, Event, float]]:
    """The process and the event of each row, and when the host launched it; rows without times are left out."""
    for name, start, end, process, *launched in connection.execute(query):
        first, last = seconds(start, SECOND), seconds(end, SECOND)
        begun = seconds(launched[0], SECOND) if launched else first
        if first is not None and last is not None and begun is not None:
            yield process, Event(str(name or ""), first, last), begun
