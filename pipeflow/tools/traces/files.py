"""Files: traces from files and folders. Must not contain: what is in them."""

from __future__ import annotations

import gzip
import os
import re
import zlib
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from pipeflow.core.errors import UsageError, paths_of
from pipeflow.core.files import LARGEST_TEXT as LARGEST
from pipeflow.core.files import opened
from pipeflow.core.timeline import Timeline
from pipeflow.tools.traces.chakra import read_chakra, read_chakra_json
from pipeflow.tools.traces.events import RankEvents
from pipeflow.tools.traces.json_traces import read_chrome, read_otlp
from pipeflow.tools.traces.nsight import read_nsight

Paths = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]
ENDINGS = (".json", ".json.gz", ".jsonl", ".sqlite", ".et")
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
        if path.exists() and not path.stat().st_size:  # as of those of /proc, of which some never end
            raise UsageError(f"{path}: this file is empty: record the steps again")
    return found


def read(path: Path) -> Timeline | list[RankEvents]:
    """The timeline of a file, or the events of the ranks that it has. Raises UsageError for a file that holds
    neither.
    """
    if path.suffix == ".sqlite":
        return _with_rank(read_nsight(path), path.name)
    if path.suffix == ".et":
        return _with_rank([read_chakra(_bytes(path), os.fspath(path))], path.name)
    whole, is_cut_off = _text(path)
    try:
        found = read_text_of(whole, os.fspath(path))
    except UsageError:
        if is_cut_off:
            raise UsageError(f"{path} is cut off before its first event: record the steps again") from None
        raise
    if is_cut_off and not isinstance(found, Timeline):
        found = [replace(each, is_cut_off=True) for each in found]
    return found


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
        content = file.read(LARGEST + 1)
    _require_small(path, len(content), LARGEST)
    return content


def _require_small(path: Path, size: int, most: int) -> None:
    if size > most:
        raise UsageError(f"{path}: unpacked, this has more than {most >> 20} MiB: record fewer steps")


def _text(path: Path) -> tuple[str, bool]:
    """The text of a file, and whether it was compressed and is cut off. Raises UsageError for one that is too large."""
    if path.suffix != ".gz":
        try:
            return _bytes(path).decode("utf-8-sig"), False
        except UnicodeDecodeError:
            raise UsageError(f"{path}: not a text file") from None
    whole, is_cut_off = bytearray(), False
    with opened(path) as file:
        most = min(LARGEST, max(MOST * os.fstat(file.fileno()).st_size, FREE))
        try:
            with gzip.open(file) as unpacked:
                while part := unpacked.read1(PART):
                    whole += part
                    _require_small(path, len(whole), most)
        except EOFError:  # what is there was read
            is_cut_off = True
        except (gzip.BadGzipFile, zlib.error) as error:
            raise UsageError(f"{path}: this is not gzip: {error}") from None
    return whole.decode(errors="replace"), is_cut_off


def _rank_in(name: str) -> int | None:
    """The rank that the name of a file says, as in `rank3.json` or `trace_3.json.gz`."""
    match = _RANK.search(re.sub(r"(\.pt)?(\.trace)?\.(json|jsonl|sqlite|et)(\.gz)?$", "", name))
    return int(match[1] or match[2]) if match else None
