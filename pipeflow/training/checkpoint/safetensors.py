"""Loads and saves weights in safetensors files, as Hugging Face models use them, also under the names and layouts of
other libraries. Every rank reads and writes its own weights, one at a time. Must not contain: the files.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipeflow.core.errors import UsageError
from pipeflow.engine.parallel.context import Context
from pipeflow.engine.parallel.transport.agreement import all_gather
from pipeflow.training.checkpoint.pieces import LocalTensor, Names, context_of, local_tensors
from pipeflow.training.checkpoint.task import Task
from pipeflow.training.checkpoint.tensor_files import (
    OutputTensor,
    TensorFiles,
    fill_pieces,
    parts_together,
    write_together,
)


@dataclass(frozen=True, slots=True)
class Transform:
    """A conversion of a stored weight to the model's weight, and back. Both functions get whole tensors; they also get
    tensors on the meta device, to find out the shape.

    Attributes:
        to_ours: converts the stored tensor to the model's.
        to_theirs: converts the model's tensor to the stored one.
    """

    to_ours: Callable[[Tensor], Tensor]
    to_theirs: Callable[[Tensor], Tensor]

    def then(self, other: Transform) -> Transform:
        """Returns the Transform that applies this one, then `other`, when loading; in reverse order when saving."""
        return Transform(
            lambda theirs: other.to_ours(self.to_ours(theirs)), lambda ours: self.to_theirs(other.to_theirs(ours))
        )

    @staticmethod
    def transposed() -> Transform:
        """Transposes a stored matrix [inputs, outputs], as in GPT-2's Conv1D, to [outputs, inputs], as in nn.Linear."""
        return Transform(Tensor.t, Tensor.t)

    @staticmethod
    def interleaved(heads: int, parts: int = 3) -> Transform:
        """Reorders the rows of a packed projection, so that the layer can be split by heads. The stored order is
        [parts, heads, width]: all queries, all keys, all values. The model's order is [heads, parts, width]: queries,
        keys and values of each head.
        """
        return Transform(
            lambda theirs: _swapped(theirs, parts, heads),
            lambda ours: _swapped(ours, heads, parts),
        )

    @staticmethod
    def padded(*, stored: int, size: int) -> Transform:
        """Pads a weight of `stored` rows to `size` rows with zeros, such as for a vocabulary that is rounded up."""
        return Transform(
            lambda theirs: functional.pad(theirs, [0, 0] * (theirs.dim() - 1) + [0, size - stored]),
            lambda ours: ours[:stored],
        )


def _swapped(rows: Tensor, outer: int, inner: int) -> Tensor:
    return rows.view(outer, inner, -1, *rows.shape[1:]).transpose(0, 1).reshape(rows.shape)


AS_IT_IS = Transform(lambda theirs: theirs, lambda ours: ours)


@dataclass(frozen=True, slots=True)
class Rename:
    """The name of a weight, or of several by a pattern, in files.

    Args:
        ours: name in the whole model. Each "{}" stands for one part of the name, without dots.
        theirs: name in the files, with the same number of "{}", which get the same parts in order.
        transform: conversion between the stored weight and the model's; by default none.

    >>> Rename("blocks.{}.wide.weight", "h.{}.mlp.c_fc.weight").theirs_of("blocks.7.wide.weight")
    'h.7.mlp.c_fc.weight'
    """

    ours: str
    theirs: str
    transform: Transform = AS_IT_IS

    def __post_init__(self) -> None:
        if self.ours.count("{}") != self.theirs.count("{}"):
            raise UsageError(f"{self.ours!r} and {self.theirs!r} must have the same number of {{}}")

    def theirs_of(self, name: str) -> str | None:
        """Returns the name of the weight `name` in the files; None if it does not match `ours`."""
        found = re.fullmatch(re.escape(self.ours).replace(r"\{\}", r"([^.]+)"), name)
        return None if found is None else self.theirs.format(*found.groups())


def renamed(name: str, renames: Iterable[Rename]) -> tuple[str, Transform]:
    """The name of `name` in the files and its transform, by the first rename that matches; unchanged if none does."""
    for rename in renames:
        if (theirs := rename.theirs_of(name)) is not None:
            return theirs, rename.transform
    return name, AS_IT_IS


StrPath = str | os.PathLike[str]
SHARD_BYTES = 5 * 10**9  # of one file, unless the caller says more or less


@dataclass(frozen=True, slots=True)
class _Entry:
    """A tensor of this rank, with its name in the files and its transform."""

    local: LocalTensor
    theirs: str
    transform: Transform

    @property
    def output(self) -> OutputTensor:
        return OutputTensor(self.local, (self.theirs,), lambda whole: {self.theirs: self.transform.to_theirs(whole)})


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
            listed = ", ".join(f"{entry.theirs!r} for {entry.local.name!r}" for entry in missing[:5])
            raise UsageError(
                f"{path} lacks {len(missing)} weights of the model: {listed}; pass rename if they have other names"
            )
        entries.sort(key=lambda entry: files.files[entry.theirs])
        for entry in entries:
            _require_shape(entry, files[entry.theirs].get_shape(), path)
        all_gather(context.world, [0.0])  # now all ranks know that it can be loaded
        Task(context, lambda: _fill_all(entries, files)).wait()


def _require_shape(entry: _Entry, shape: Sequence[int], path: StrPath) -> None:
    wanted = entry.local.shape
    found = None
    with suppress(RuntimeError):  # from a transform that cannot be applied
        found = entry.transform.to_ours(torch.empty(shape, device="meta")).shape
    if found != wanted:
        raise UsageError(
            f"{entry.theirs!r} in {path} has shape {tuple(shape)}, which does not fit {entry.local.name!r} of shape "
            f"{tuple(wanted)}: check the model's sizes and rename"
        )


def _fill_all(entries: Sequence[_Entry], files: TensorFiles) -> None:
    for entry in entries:
        stored = files[entry.theirs]
        fill_pieces(entry.local.pieces, stored if entry.transform is AS_IT_IS else entry.transform.to_ours(stored[...]))


def save_safetensors(
    path: StrPath,
    model: nn.Module,
    rename: Sequence[Rename] = (),
    *,
    names: Names | None = None,
    shard_bytes: int = SHARD_BYTES,
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
        outputs = [entry.output for entry in _entries(model, context, names, rename)]
        write_together(path, outputs, context, shard_bytes=shard_bytes)


@contextmanager
def saved_parts(path: Path, model: nn.Module) -> Iterator[list[Path]]:
    """Context manager that yields safetensors files which together have all weights and persistent buffers, in a hidden
    folder beside `path`; an empty list on ranks other than the first. All ranks enter and leave it together. An error
    in it is raised on every rank. Raises as `save_safetensors`.
    """
    context = context_of(model)
    with context.alarm.raised_everywhere():
        outputs = [entry.output for entry in _entries(model, context, None, ())]
        with parts_together(path, outputs, context, shard_bytes=SHARD_BYTES) as parts:
            yield [Path(part.file) for part in parts]
