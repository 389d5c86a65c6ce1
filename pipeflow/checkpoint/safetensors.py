"""Weights in the files that Hugging Face models come in: safetensors, several of them with an index. Every rank reads
and writes what it holds, one weight at a time. What must not live here: what weights are called elsewhere.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from pipeflow.checkpoint.pieces import LocalTensor, Names, context_of, local_tensors
from pipeflow.checkpoint.renames import AS_IT_IS, Rename, Transform, renamed
from pipeflow.checkpoint.task import Task
from pipeflow.checkpoint.tensor_files import Output, TensorFiles, fill_piece, write_together
from pipeflow.core.errors import UsageError
from pipeflow.parallel.context import Context
from pipeflow.parallel.transport.agreement import all_gather

StrPath = str | os.PathLike[str]


@dataclass(frozen=True, slots=True)
class _Entry:
    """A tensor of this rank and what the files have for it."""

    local: LocalTensor
    theirs: str
    transform: Transform

    @property
    def name(self) -> str:
        return self.local.name

    def stored(self, whole: Tensor) -> dict[str, Tensor]:
        """What the files have of the whole tensor."""
        return {self.theirs: self.transform.to_theirs(whole)}


def _entries(model: nn.Module, context: Context, names: Names | None, rename: Sequence[Rename]) -> list[_Entry]:
    return [_Entry(local, *renamed(local.name, rename)) for local in local_tensors(model, context, names)]


def load_safetensors(
    path: StrPath, model: nn.Module, rename: Sequence[Rename] = (), *, names: Names | None = None
) -> None:
    """Fills all weights and persistent buffers of `model` from safetensors files. All ranks call it together; each
    reads what it holds, and of a split weight without a transform only its part.

    Args:
        path: a file, or a folder with `model.safetensors` or `model.safetensors.index.json`.
        model: a Pipeline, or any module. Dtypes may differ from the files'.
        rename: what the files call a weight, by its name in the whole model; the first that is about it counts, and
            a weight that none is about has one name in both. What the files have besides is not read.
        names: as for `save_checkpoint`.

    Raises UsageError, before anything is changed, for what is missing or has another shape, and where the package
    safetensors is not installed; PipelineError on the ranks that did not notice.
    """
    context = context_of(model)
    with context.alarm.raised_everywhere():
        files = TensorFiles(Path(path))
        entries = _entries(model, context, names, rename)
        if missing := [entry for entry in entries if entry.theirs not in files.files]:
            listed = ", ".join(f"{entry.theirs!r} for {entry.name!r}" for entry in missing[:5])
            raise UsageError(f"{path} lacks {len(missing)} weights of the model: {listed}; see rename")
        entries.sort(key=lambda entry: files.files[entry.theirs])
        for entry in entries:
            _require_shape(entry, files[entry.theirs].get_shape(), path)
        all_gather(context.world, [0.0])  # from here on all ranks know that it can be loaded
        Task(context, lambda: _fill_all(entries, files)).wait()


def _require_shape(entry: _Entry, shape: Sequence[int], path: StrPath) -> None:
    wanted = entry.local.piece.shape
    found = None
    with suppress(RuntimeError):  # of a transform that cannot be applied
        found = entry.transform.to_ours(torch.empty(shape, device="meta")).shape
    if found != wanted:
        raise UsageError(
            f"{entry.theirs!r} of {path} is {tuple(shape)}, which does not make {tuple(wanted)} for {entry.name!r}"
        )


def _fill_all(entries: Sequence[_Entry], files: TensorFiles) -> None:
    for entry in entries:
        _fill(entry, files)


def _fill(entry: _Entry, files: TensorFiles) -> None:
    stored = files[entry.theirs]
    fill_piece(entry.local.piece, stored if entry.transform is AS_IT_IS else entry.transform.to_ours(stored[...]))


def save_safetensors(
    path: StrPath,
    model: nn.Module,
    rename: Sequence[Rename] = (),
    *,
    names: Names | None = None,
    shard_bytes: int = 5 * 10**9,
) -> None:
    """Writes all weights and persistent buffers to safetensors files in the folder `path`: `model.safetensors`, or
    several with `model.safetensors.index.json`. All ranks call it together. The first replica writes; each of its
    pipeline ranks puts its split weights together one at a time, and holds at most `shard_bytes` of them. Files of
    these names that were there before are replaced when all others are written.

    Args:
        path, model, rename, names: as for `load_safetensors`. A tied weight of two names is written once where
            `rename` gives both the same one.
        shard_bytes: how large a file may become, unless one weight alone is larger.

    Raises UsageError when two weights get one name, and where the package safetensors is not installed; PipelineError
    on the ranks that did not notice.
    """
    path, context = Path(path), context_of(model)
    with context.alarm.raised_everywhere():
        outputs = [
            Output(entry.local, (entry.theirs,), entry.stored) for entry in _entries(model, context, names, rename)
        ]
        write_together(path, outputs, context, shard_bytes=shard_bytes)
