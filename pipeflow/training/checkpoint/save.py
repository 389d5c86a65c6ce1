"""save_checkpoint: saves a run's state to a folder, by names and shapes that do not depend on the layout. Each rank
agrees on its part with the other ranks and writes it; the last rank completes the folder.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from pipeflow.core.errors import PipeflowError, UsageError
from pipeflow.engine.parallel.context import Context
from pipeflow.engine.parallel.transport.agreement import all_gather, all_gather_object
from pipeflow.training.checkpoint import folders, state
from pipeflow.training.checkpoint.folders import INDEX, TORCHS, Hold, data_file, part_file
from pipeflow.training.checkpoint.manifest import Digest, Manifest, keep_newest, next_sequence, read_json
from pipeflow.training.checkpoint.pieces import (
    LocalTensor,
    Names,
    TensorSpec,
    context_of,
    local_tensors,
    whole_model,
    wholes,
)
from pipeflow.training.checkpoint.storage import (
    Part,
    WriteItem,
    divided,
    index_for_torch,
    index_of,
    parts_in,
    to_bytes,
    write,
    write_items,
)
from pipeflow.training.checkpoint.task import Task, require_same
from pipeflow.training.optim.optimizer import by_name
from pipeflow.training.optim.rates import Scheduler

# Theory of operation
#
# A checkpoint is a folder that is whole or not there. Ranks write into a hidden folder, and a rename makes it visible.
# They agree once, before anything is written: on the name of the hidden folder, on the sequence number, and on who
# writes which part (`divided`). After that they need no messages, so the writing can run on threads during training,
# whose collectives must keep their order.
#
# Each rank writes its data, then `part-N` with the places and digests, atomically. Whoever sees all parts after its own
# tries to complete the checkpoint. Several ranks may see this at once, so the first one claims the folder by renaming
# it; for the others the rename fails, and they are done. It then writes the index and the manifest and publishes the
# folder.
#
# A process may be killed at any moment. Until the last rename the old checkpoint is untouched, or waits under the name
# `previous`. The next save finds leftovers by their names, and removes or restores them (`folders.clean`).
#
# Other processes may save into the same folder. Ranks hold locks on the hidden folder that they write (`folders.Hold`),
# and a folder that is held is nobody else's to remove. Where locks do not work, a folder may be taken from its writer,
# but only whole, by a rename: then nobody can claim it, and the save fails.

LOG = logging.getLogger("pipeflow")
_ISSUED: dict[Path, int] = {}  # the last sequence number of this process, by folder
_SHARED: set[Path] = set()  # folders of which this process has warned
_TWO = (
    "another process has saved checkpoints into %s since this one's last save: pass a folder of its own to each run; "
    "in a shared one, a run resumes from the other's checkpoints, and keep= removes them"
)


def _begin(path: Path) -> tuple[Path, Hold, int]:
    """Begins the save on rank 0: its hidden folder, this rank's hold of it, and the save's sequence number."""

    def number(folder: Path) -> int:
        folders.require_free(path)
        return next_sequence(folder)

    folders.require_name(path)
    try:
        begun = folders.begin(path, number)
    except OSError as error:
        raise _failed(path, error) from error
    folder, sequence = path.parent.resolve(), begun[2]
    if sequence > _ISSUED.get(folder, sequence) + 1 and folder not in _SHARED:
        _SHARED.add(folder)
        LOG.warning(_TWO, path.parent)
    _ISSUED[folder] = sequence
    return begun


def _held(path: Path, temporary: Path) -> Hold:
    """Another rank's hold of the hidden folder that rank 0 has made. Raises UsageError if it is not there."""
    try:
        return folders.join(temporary)
    except OSError as error:
        raise _failed(path, error) from error


def _failed(path: Path, reason: object) -> UsageError:
    return UsageError(f"checkpoint {path} could not be written: {reason}; nothing was saved")


class Saving:
    """A checkpoint that is being written; `save_checkpoint` returns it. Its folder gets its name when the last rank is
    done.

    A thread writes this rank's part. It communicates with the other ranks only through the folder, so training can go
    on: the rank that finds all parts there completes the checkpoint.

    Args:
        path: the checkpoint's path.
        context: the ranks that save together. They agree on who writes what.
        content: what this rank has.
        specs: this rank's tensors.
        step, keep, asynchronous: as in `save_checkpoint`.

    Attributes:
        path: the checkpoint's path.

    Raises UsageError if the ranks' paths, names or parts do not fit together, or if `path` has something that is no
    checkpoint, or if no folder can be made there. Nothing is then written.
    """

    def __init__(
        self,
        path: Path,
        context: Context,
        content: list[WriteItem],
        specs: list[TensorSpec],
        *,
        step: int | None,
        keep: int | None,
        asynchronous: bool,
    ) -> None:
        self.path = path
        self._context = context
        self._step, self._keep = step, keep
        require_same(context, {"path": str(path), "step": step, "keep": keep})
        begun = _begin(path) if context.rank == 0 else None
        try:
            told = [tuple(item.part) for item in content], list(map(tuple, specs)), begun and (begun[0].name, begun[2])
            everyone: list[Any] = all_gather_object(context.world, told)
            everyones, all_specs, begins = zip(*everyone, strict=True)
            whole_model(all_specs)
            shares = divided([[Part(*each) for each in one] for one in everyones])
            own = [item for item in content if item.part.key in shares[context.rank]]
            self._content = [item.copied() for item in own] if asynchronous else own
            name, self._sequence = begins[0]
            self._folder = path.with_name(name)  # hidden
            self._hold = begun[1] if begun else _held(path, self._folder)
        except BaseException:
            if begun:
                begun[1].release()
                folders.discard(begun[0])
            raise
        self._published = threading.Event()  # by this rank
        self._is_complete = False
        self._task = Task(context, self._run_aloud if asynchronous else self._run)

    def wait(self) -> Path:
        """Waits until the checkpoint is complete and returns its path. All ranks call it together.

        Raises UsageError on a rank that could not write, and PipelineError on the others.
        """
        if self._is_complete:
            return self.path
        try:
            with self._context.alarm.raised_everywhere():
                self._task.wait()
                Task(self._context, self._complete_late).wait()
                if not any(each for [each] in all_gather(self._context.world, [self._published.is_set()])):
                    raise _failed(self.path, self._removed)
        except PipeflowError:
            self._hold.release()
            if not self._published.is_set():
                folders.discard(self._folder)
            raise
        self._hold.release()
        self._is_complete = True
        return self.path

    @property
    def _removed(self) -> str:
        return f"its hidden folder, {self._folder.name}, was removed meanwhile"

    def _run_aloud(self) -> None:
        """Runs the save and logs an error at once, since the program may never call `wait`."""
        try:
            self._run()
        except UsageError as error:
            LOG.error("rank %d: %s", self._context.rank, error)
            raise

    def _run(self) -> None:
        """Writes this rank's part; the last rank completes the checkpoint. Raises UsageError that names the path."""
        with self._named():
            if self._context.rank == 0:
                folders.clean(self.path.parent, self._folder.stat().st_mtime)
            self._write()
            if all((self._folder / part_file(rank)).exists() for rank in range(self._context.world_size)):
                self._complete()

    def _complete_late(self) -> None:
        """Completes the checkpoint if a slow file system did not show the last rank all parts."""
        if self._context.rank == 0:
            with self._named():
                self._complete()

    @contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._hold.release()
            raise _failed(self.path, self._removed if self._is_gone(error) else error) from error

    def _is_gone(self, error: Exception) -> bool:
        """Whether the hidden folder was not there. A rank that began later may have made it again meanwhile."""
        missing = Path(getattr(error, "filename", None) or "")
        is_in_it = self._folder in (missing, *missing.parents)
        return isinstance(error, FileNotFoundError) and (is_in_it or not self._folder.exists())

    def _write(self) -> None:
        file = self._folder / data_file(self._context.rank)
        parts, digest = write(file, self._content)
        part = {"digest": asdict(digest), "index": index_of(parts)}
        folders.write_durably(self._folder / part_file(self._context.rank), json.dumps(part).encode())

    def _complete(self) -> None:
        """Adds index and manifest and renames the checkpoint; done by the first caller only."""
        folder = folders.claim(self._folder)
        if folder is None:
            return
        files: dict[str, Digest] = {}
        parts: list[Part] = []
        for rank in range(self._context.world_size):
            part, file = folder / part_file(rank), data_file(rank)
            files[file], written = read_json(part, part.read_bytes, partial(_written, file))
            parts += written
            part.unlink()
        folders.write_durably(folder / TORCHS, index_for_torch(parts))
        folders.write_durably(folder / INDEX, json.dumps(index_of(parts)).encode())
        files |= {name: Digest.of(folder / name) for name in (INDEX, TORCHS)}
        manifest = Manifest(self._step, self._sequence, self._context.layout, files)
        manifest.write(folder)
        manifest.require_sizes(folder)
        folders.publish(folder, self.path)
        self._published.set()
        self._settle()

    def _settle(self) -> None:
        """What comes after the checkpoint has its name: an error in it is a warning, since the checkpoint is there."""
        try:
            folders.published(self.path)
            if self._keep is not None:
                keep_newest(self.path, self._keep)
        except OSError as error:
            LOG.warning("checkpoint %s is saved, but older ones could not be removed: %s", self.path, error)


def _written(file: str, told: Any) -> tuple[Digest, list[Part]]:
    """What a rank has told of the `file` that it has written."""
    digest = Digest.read(told["digest"])
    return digest, parts_in(told["index"], {file: digest})


def save_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    scheduler: Scheduler | None = None,
    step: int | None = None,
    data: Any = None,
    extra: Any = None,
    names: Names | None = None,
    keep: int | None = None,
    asynchronous: bool = False,
) -> Saving:
    """Saves a run's state to the folder `path`, on storage that all ranks share. All ranks call it together; replicas
    share the writing.

    If a process is killed during the save, `load_checkpoint` still reads the previous checkpoint at `path`; the next
    save in the same folder removes what the killed one left. A checkpoint or an empty folder at `path` is replaced;
    anything else there is an error, and stays as it is.

    Every weight and persistent buffer is stored under its name in the whole model. By default this is its name within
    its stage, so a stage must not number its blocks from 0 again. A weight with two names is stored under both. Buffers
    are those of the first replica.

    Args:
        path: the checkpoint's name in a folder that only one run writes to, such as `runs/7/step-00001000`.
        model: a Pipeline, or any module that every rank holds whole except for parameters split over tensor ranks.
        optimizer: optimizer whose states and options to save, by the names of its parameters.
        scheduler: learning-rate scheduler to save; rank 0's is stored, so groups must be the same on all ranks.
        step: number of steps taken; `latest_checkpoint` returns the checkpoint with the highest step. If steps are
            equal or missing, it returns the last save.
        data: position in the data of all replicas together, as plain values and tensors; rank 0's is stored.
        extra: further plain values and tensors; rank 0's are stored.
        names: `names(stage, name)` returns a tensor's name in the whole model, if its name in the stage differs.
        keep: number of checkpoints to keep in the folder of `path`, those begun last; by default all. Checkpoints that
            a link in the folder points to are kept as well.
        asynchronous: return after this rank's part is copied to the CPU, and write while training goes on. If that
            fails, the failed rank logs an error at once, and `wait` raises it.

    Returns a Saving; all ranks call its `wait` together. Without `asynchronous` it is already complete.

    Raises UsageError on a rank that noticed a mistake or could not write, and PipelineError on the others.
    """
    if keep is not None and keep < 1:
        raise UsageError(f"keep must be at least 1 (the checkpoint being saved), got {keep}")
    if step is not None and (isinstance(step, bool) or not isinstance(step, int) or step < 0):
        raise UsageError(f"step must be a whole number (of steps that the run has taken), got {step!r}")
    path, context = folders.path_of(path), context_of(model)
    with context.alarm.raised_everywhere():
        tensors = local_tensors(model, context, names)
        rates = None if scheduler is None else scheduler.state_dict()
        run = {"step": step, "data": data, "extra": extra, "scheduler": rates}
        content = _content(context, model, tensors, optimizer, run)
        specs = [each.spec for each in tensors]
        saving = Saving(path, context, content, specs, step=step, keep=keep, asynchronous=asynchronous)
    if not asynchronous:
        saving.wait()
    return saving


def _content(
    context: Context,
    model: nn.Module,
    tensors: list[LocalTensor],
    optimizer: Optimizer | None,
    run: dict[str, Any],
) -> list[WriteItem]:
    first_replica = context.copies.rank == 0 and context.tensor_rank == 0
    pieces = state.weight_pieces([each for each in tensors if each.is_parameter or first_replica])
    values: dict[str, bytes] = {}
    if optimizer is not None:
        states, values, run["optimizer"] = state.optimizer_content(by_name(optimizer, model), tensors)
        pieces.update(states)
    if context.rank == 0:
        values[state.RUN] = to_bytes("data, extra or the scheduler", run)
    return write_items({**pieces, **wholes(state.random_states(context))}, values)
