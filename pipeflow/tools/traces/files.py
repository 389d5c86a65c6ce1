"""Files: traces from files and folders. Must not contain: what is in them."""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from pipeflow.core.errors import UsageError, paths_of
from pipeflow.core.files import opened, read_text
from pipeflow.core.timeline import Timeline
from pipeflow.tools.traces.chakra import read_chakra, read_chakra_json
from pipeflow.tools.traces.events import RankEvents
from pipeflow.tools.traces.json_traces import read_chrome, read_otlp
from pipeflow.tools.traces.nsight import read_nsight

Paths = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]
ENDINGS = (".json", ".json.gz", ".jsonl", ".sqlite", ".et")
LARGEST = 2**32  # bytes of a text, also of one that was compressed, so that no file can fill the memory
MOST, FREE, PART = 50, 2**26, 2**24  # times its size that a file has unpacked, beyond so many bytes; bytes at once
_RANK = re.compile(r"rank[-_=]?(\d+)|(?<!\d)(\d+)(?=\D*$)", re.IGNORECASE)


def trace_files(paths: Paths) -> list[Path]:
    """The files behind a path or several, which may be folders. Raises UsageError if there are none."""
    found: list[Path] = []
    for path in map(Path, paths_of("paths", paths)):
        if not path.is_dir():
            found.append(path)
            continue
        inside = sorted(each for each in path.iterdir() if each.name.endswith(ENDINGS))
        if not inside:
            raise UsageError(f"{path}: there are no traces in this folder, which end in {' or '.join(ENDINGS)}")
        found += inside
    for path in found:
        if path.exists() and not path.is_file():  # to read a pipe may never end
            raise UsageError(f"{path}: this is no file: give a trace, or a folder of traces")
    return found


def read(path: Path) -> Timeline | list[RankEvents]:
    """The timeline of a file, or the events of the ranks that it has. Raises UsageError for a file that holds
    neither.
    """
    if path.suffix == ".sqlite":
        return _with_rank(read_nsight(path), path.name)
    if path.suffix == ".et":
        return _with_rank([read_chakra(_bytes(path), os.fspath(path))], path.name)
    return read_text_of(_text(path), os.fspath(path))


def read_text_of(text: str, source: str) -> Timeline | list[RankEvents]:
    """The timeline in the text of a file of JSON, or the events of the ranks that it has. Raises UsageError for a text
    that holds neither.
    """
    start, name = text.lstrip()[:1], os.path.basename(source)
    if start not in ("{", "["):
        raise UsageError(f"{source} is not JSON: give a trace of torch.profiler, or a timeline of pipeflow")
    if '"traceEvents"' in text or start == "[":
        return _with_rank([read_chrome(text, source)], name)
    if '"resourceSpans"' in text:
        return read_otlp(text, source)
    if '"nodes"' in text and '"schema"' in text:
        return _with_rank([read_chakra_json(text, source)], name)
    if '"paths"' not in text:
        raise UsageError(f"{source}: it has neither traceEvents nor resourceSpans, and is no timeline of pipeflow")
    try:
        return Timeline.from_json(text)
    except UsageError as error:
        raise UsageError(f"{source}: {error}") from None


def _with_rank(found: list[RankEvents], name: str) -> list[RankEvents]:
    """The events with the rank that the name of their file says, if the file is of one rank and does not say it."""
    return [replace(found[0], rank=_rank_in(name))] if len(found) == 1 and found[0].rank is None else found


def _bytes(path: Path) -> bytes:
    with opened(path) as file:
        return file.read()


def _text(path: Path) -> str:
    if path.suffix != ".gz":
        return read_text(path, LARGEST)
    packed, whole = _bytes(path), bytearray()
    most = min(LARGEST, max(MOST * len(packed), FREE))
    while packed:
        reader = zlib.decompressobj(wbits=31)  # of a file that is cut off, it gives what is there
        while packed and not reader.eof:
            try:
                whole += reader.decompress(packed, PART)
            except zlib.error as error:
                raise UsageError(f"{path}: this is not gzip: {error}") from None
            packed = reader.unconsumed_tail
            if len(whole) > most:
                raise UsageError(f"{path}: unpacked, this has more than {most >> 20} MiB: record fewer steps")
        packed = reader.unused_data
    return whole.decode(errors="replace")


def _rank_in(name: str) -> int | None:
    """The rank that the name of a file says, as in `rank3.json` or `trace_3.json.gz`."""
    match = _RANK.search(re.sub(r"(\.pt)?(\.trace)?\.(json|jsonl|sqlite|et)(\.gz)?$", "", name))
    return int(match[1] or match[2]) if match else None
