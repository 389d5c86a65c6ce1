"""Loads and saves weights in safetensors files, as Hugging Face models use them. Every rank reads and writes its own
weights, one at a time. Must not contain: names in other libraries.
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
from pipeflow.checkpoint.tensor_files import OutputTensor, TensorFiles, fill_piece, write_together
from pipeflow.core.errors import UsageError
from pipeflow.parallel.context import Context
from pipeflow.parallel.transport.agreement import all_gather

StrPath = str | os.PathLike[str]


@dataclass(frozen=True, slots=True)
class _Entry:
    """A tensor of this rank, with its name in the files and its transform."""

    local: LocalTensor
    theirs: str
    transform: Transform

    @property
    def name(self) -> str:
        return self.local.name

    def stored(self, whole: Tensor) -> dict[str, Tensor]:
        """The tensors to store for the whole tensor, by name in the files."""
        return {self.theirs: self.transform.to_theirs(whole)}


def _entries(model: nn.Module, context: Context, names: Names | None, rename: Sequence[Rename]) -> list[_Entry]:
    return [_Entry(local, *renamed(local.name, rename)) for local in local_tensors(model, context, names)]


def load_safetensors(
    path: StrPath, model: nn.Module, rename: Sequence[Rename] = (), *, names: Names | None = None
) -> None:
    """Loads all weights and persistent buffers of `model` from safetensors files. All ranks call it together; each
    reads only its own weights, and only its part of a split weight that has no transform.

    Args:
        path: a file, or a folder with `model.safetensors` or `model.safetensors.index.json`.
        model: a Pipeline, or any module. Its dtypes may differ from the files'.
        rename: names and layouts of weights in the files. The first Rename that matches a weight is used; a weight
            without one has the same name in the files. Other tensors in the files are ignored.
        names: as in `save_checkpoint`.

    Raises UsageError if a weight is missing or has another shape, or if the package safetensors is not installed.
    Nothing is then changed. Ranks that did not notice the error raise PipelineError.
    """
    context = context_of(model)
    with context.alarm.raised_everywhere():
        files = TensorFiles(Path(path))
        entries = _entries(model, context, names, rename)
        if missing := [entry for entry in entries if entry.theirs not in files.files]:
            listed = ", ".join(f"{entry.theirs!r} for {entry.name!r}" for entry in missing[:5])
            raise UsageError(
                f"{path} lacks {len(missing)} weights of the model: {listed}; pass rename if they have other names"
            )
        entries.sort(key=lambda entry: files.files[entry.theirs])
        for entry in entries:
            _require_shape(entry, files[entry.theirs].get_shape(), path)
        all_gather(context.world, [0.0])  # now all ranks know that it can be loaded
        Task(context, lambda: _fill_all(entries, files)).wait()


def _require_shape(entry: _Entry, shape: Sequence[int], path: StrPath) -> None:
    wanted = entry.local.piece.shape
    found = None
    with suppress(RuntimeError):  # from a transform that cannot be applied
        found = entry.transform.to_ours(torch.empty(shape, device="meta")).shape
    if found != wanted:
        raise UsageError(
            f"{entry.theirs!r} in {path} has shape {tuple(shape)}, which does not fit {entry.name!r} of shape "
            f"{tuple(wanted)}: check the model's sizes and rename"
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
    """Saves the whole model, weights and persistent buffers, in the folder `path`: as `model.safetensors` if it has at
    most `shard_bytes`, otherwise as several files and `model.safetensors.index.json`. All ranks call it together. The
    first replica writes: each of its pipeline ranks gathers its split weights one at a time and holds at most
    `shard_bytes` of them. Existing files of these names are replaced after all files were written.

    Args:
        path, model, names: as in `load_safetensors`.
        rename: as in `load_safetensors`. A tied weight with two names is written once if `rename` maps both to one.
        shard_bytes: maximum size of a file in bytes, unless a single weight is larger.

    Raises UsageError if two weights get one name, or if the package safetensors is not installed. Ranks that did not
    notice the error raise PipelineError.
    """
    path, context = Path(path), context_of(model)
    with context.alarm.raised_everywhere():
        outputs = [
            OutputTensor(entry.local, (entry.theirs,), entry.stored)
            for entry in _entries(model, context, names, rename)
        ]
        write_together(path, outputs, context, shard_bytes=shard_bytes)
