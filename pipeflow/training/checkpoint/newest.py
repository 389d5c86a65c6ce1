"""latest_checkpoint: finds the newest checkpoint in a folder; also removes old ones."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import cast

from pipeflow.core.errors import UsageError
from pipeflow.engine.parallel.context import Context
from pipeflow.engine.parallel.transport.agreement import all_gather_object
from pipeflow.training.checkpoint import folders
from pipeflow.training.checkpoint.folders import MANIFEST, is_checkpoint
from pipeflow.training.checkpoint.manifest import Manifest, find, verified
from pipeflow.training.checkpoint.state import read_run
from pipeflow.training.checkpoint.storage import CheckpointStorage
from pipeflow.training.checkpoint.task import Task, context_here

LOG = logging.getLogger("pipeflow")
_LEFT_OUT = "checkpoint %s is skipped: %s"


def latest_checkpoint(folder: str | os.PathLike[str], *, verify: bool = True) -> Path | None:
    """Returns the newest complete checkpoint in `folder`, None if there is none. It is the one with the highest step.
    If steps are equal, it is the one whose save began last. A checkpoint that was saved without a step counts as having
    the highest step before it. Damaged checkpoints are skipped with a warning in the logger "pipeflow".

    Args:
        folder: the folder that contains the checkpoints.
        verify: if True, check the digest of every file and read everything in the index. If pipeflow was launched, all
            ranks must then call it together: each checks a share of the files, and all get the same answer. If False,
            only the sizes of files are checked, and any rank may call it alone. `load_checkpoint` always verifies.

    Raises PipelineError if a rank failed.
    """
    if not verify:
        return _first_whole(_newest_first(Path(folder)), lambda path: _fault(path, 0, 0))
    context = context_here()
    with context.alarm.raised_everywhere():
        names = [str(path) for path in _newest_first(Path(folder))] if context.rank == 0 else None
        of_rank_0 = cast(list[str], all_gather_object(context.world, names)[0])
        return _first_whole(map(Path, of_rank_0), partial(_fault_anywhere, context), warn=context.rank == 0)


def _first_whole(paths: Iterable[Path], fault_of: Callable[[Path], str | None], *, warn: bool = True) -> Path | None:
    for path in paths:
        if (fault := fault_of(path)) is None:
            return path
        if warn:
            LOG.warning(_LEFT_OUT, path, fault)
    return None


def _fault(path: Path, rank: int, ranks: int) -> str | None:
    """The fault of a checkpoint, None if it has none. `rank` checks its share of the files' contents, one of `ranks`
    shares; none if `ranks` is 0.
    """
    try:
        folder = find(path)
        manifest = verified(folder, rank, ranks)
        if ranks:
            storage = CheckpointStorage(folder, manifest)
            storage.require_readable(rank, ranks)
            read_run(storage)
    except UsageError as error:
        return str(error)
    return None


def _fault_anywhere(context: Context, path: Path) -> str | None:
    """The first fault that a rank found in its share, None if there is none; the same on all ranks."""
    found: list[str | None] = []
    Task(context, lambda: found.append(_fault(path, context.rank, context.world_size))).wait()
    everyone = cast(list[str | None], all_gather_object(context.world, found[0]))
    return next(filter(None, everyone), None)


def _newest_first(folder: Path) -> list[Path]:
    """The checkpoints whose manifest can be read, newest first; warns of the others."""
    reached, order = -1, dict[Path, tuple[int, int]]()
    for path, manifest in _saved_in_order(folder, warn=True):
        step = reached if manifest.step is None else manifest.step
        reached, order[path] = max(reached, step), (step, manifest.sequence)
    return sorted(order, key=order.__getitem__, reverse=True)


def keep_newest(path: Path, keep: int) -> None:
    """Removes old checkpoints beside `path`. Keeps the `keep` that were begun last, those that links in the folder
    point to, and those in which somebody else has put something. Raises OSError.
    """
    linked = {os.path.realpath(each) for each in path.parent.iterdir() if each.is_symlink()}
    for old, _ in _saved_in_order(path.parent)[:-keep]:
        if os.path.realpath(old) in linked:
            continue
        try:
            if is_checkpoint(found := find(old)):
                folders.put_away(found, old)
        except (UsageError, FileNotFoundError):
            continue  # another save removes it, too
        except OSError as error:
            LOG.warning("checkpoint %s cannot be removed: %s", old, error)


def next_sequence(folder: Path) -> int:
    """A sequence number larger than that of any checkpoint in `folder`, including those being written."""
    complete = [manifest.sequence for _, manifest in _saved_in_order(folder)]
    return 1 + max([*complete, *(int(found["sequence"] or 0) for _, found in folders.hidden(folder))], default=0)


def _saved_in_order(folder: Path, *, warn: bool = False) -> list[tuple[Path, Manifest]]:
    """All checkpoints whose manifest can be read, in the order of saving."""
    found = []
    for path in sorted(_paths(folder)):
        try:
            found.append((path, Manifest.read(find(path))))
        except UsageError as error:
            if warn:
                LOG.warning(_LEFT_OUT, path, error)
    return sorted(found, key=lambda each: each[1].sequence)


def _paths(folder: Path) -> Iterator[Path]:
    """Paths of the checkpoints in `folder`, without links. Includes those whose replacement was cut short."""
    there = {path for path in folder.iterdir() if not path.name.startswith(".")} if folder.is_dir() else set()
    there |= {folder / found["name"] for _, found in folders.hidden(folder) if found["process"] is None}
    for path in there:
        if not path.is_symlink() and any((each / MANIFEST).is_file() for each in (path, folders.previous(path))):
            yield path
