"""Files: traces from files and folders. Must not contain: what is in them."""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from pipeflow.core.errors import UsageError
from pipeflow.core.files import read_text
from pipeflow.core.timeline import Timeline
from pipeflow.traces.chrome import read_chrome
from pipeflow.traces.events import RankEvents
from pipeflow.traces.nsight import read_nsight
from pipeflow.traces.otlp import read_otlp

ENDINGS = (".json", ".json.gz", ".jsonl", ".sqlite")
_RANK = re.compile(r"rank[-_=]?(\d+)|(?<!\d)(\d+)(?=\D*$)", re.IGNORECASE)


def trace_files(paths: Sequence[str | os.PathLike[str]]) -> list[Path]:
    """The files behind `paths`, of which one may be a folder. Raises UsageError if there are none."""
    found: list[Path] = []
    for path in map(Path, paths):
        if not path.is_dir():
            found.append(path)
            continue
        inside = sorted(each for each in path.iterdir() if each.name.endswith(ENDINGS))
        if not inside:
            raise UsageError(f"{path}: there are no traces in this folder, which end in {' or '.join(ENDINGS)}")
        found += inside
    return found


def read(path: Path) -> Timeline | list[RankEvents]:
    """The timeline of a file, or the events of the ranks that it has. Raises UsageError for a file that holds
    neither.
    """
    if path.suffix == ".sqlite":
        return [_with_rank(read_nsight(path), path)]
    text = _text(path)
    start = text.lstrip()[:1]
    if start not in ("{", "["):
        raise UsageError(f"{path} is not JSON: give a trace of torch.profiler, or a timeline of pipeflow")
    try:
        if '"traceEvents"' in text or start == "[":
            return [_with_rank(read_chrome(text, os.fspath(path)), path)]
        if '"resourceSpans"' in text:
            return read_otlp(text, os.fspath(path))
        if '"paths"' in text:
            return Timeline.from_json(text)
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from None
    raise UsageError(f"{path}: it has neither traceEvents nor resourceSpans, and is no timeline of pipeflow")


def _with_rank(events: RankEvents, path: Path) -> RankEvents:
    return events if events.rank is not None else replace(events, rank=_rank_in(path.name))


def _text(path: Path) -> str:
    if path.suffix != ".gz":
        return read_text(path)
    try:
        packed = path.read_bytes()
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None
    parts = []
    while packed:
        reader = zlib.decompressobj(wbits=31)  # of a file that is cut off, it gives what is there
        try:
            parts.append(reader.decompress(packed))
        except zlib.error as error:
            raise UsageError(f"{path}: this is not gzip: {error}") from None
        packed = reader.unused_data
    return b"".join(parts).decode(errors="replace")


def _rank_in(name: str) -> int | None:
    """The rank that the name of a file says, as in `rank3.json` or `trace_3.json.gz`."""
    match = _RANK.search(re.sub(r"(\.pt)?(\.trace)?\.(json|jsonl|sqlite)(\.gz)?$", "", name))
    return int(match[1] or match[2]) if match else None
