"""Weights in the files that Hugging Face models come in: safetensors, several of them with an index. Every rank reads
and writes what it holds, one weight at a time. What must not live here: what weights are called elsewhere.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pipeflow.checkpoint.folders import write_durably
from pipeflow.checkpoint.pieces import LocalTensor, Names, Piece, TensorSpec, context_of, local_tensors, whole_model
from pipeflow.checkpoint.renames import AS_IT_IS, Rename, Transform, renamed
from pipeflow.checkpoint.task import Task
from pipeflow.core.errors import UsageError
from pipeflow.parallel.context import Context
from pipeflow.parallel.transport.agreement import all_gather, all_gather_object

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
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
        files = files_of(Path(path))
        entries = _entries(model, context, names, rename)
        if missing := [entry for entry in entries if entry.theirs not in files]:
            listed = ", ".join(f"{entry.theirs!r} for {entry.name!r}" for entry in missing[:5])
            raise UsageError(f"{path} lacks {len(missing)} weights of the model: {listed}; see rename")
        by_file = sorted(entries, key=lambda entry: files[entry.theirs])
        for entry, stored in _opened(by_file, files):
            _require_shape(entry, stored.get_shape(), path)
        all_gather(context.world, [0.0])  # from here on all ranks know that it can be loaded
        Task(context, lambda: _fill_all(by_file, files)).wait()


def files_of(path: Path) -> dict[str, Path]:
    """The file of every tensor in a file or folder. Raises UsageError when there is none."""
    if path.is_dir() and (path / INDEX).is_file():
        try:
            return {name: path / file for name, file in json.loads((path / INDEX).read_bytes())["weight_map"].items()}
        except (KeyError, AttributeError, json.JSONDecodeError) as error:
            raise UsageError(f"{path / INDEX} is damaged: {error!r}; fetch it again") from error
    file = path / SINGLE if path.is_dir() else path
    if not file.is_file():
        raise UsageError(f"{path} has no weights: give a .safetensors file, or a folder with {SINGLE} or {INDEX}")
    with _open(file) as opened:
        return dict.fromkeys(opened.keys(), file)


def _opened(entries: Iterable[_Entry], files: Mapping[str, Path]) -> Iterator[tuple[_Entry, Any]]:
    """With every entry what reads its tensor or parts of it; `entries` are in order of their files, of which one is
    open at a time.
    """
    for file, of_file in groupby(entries, key=lambda entry: files[entry.theirs]):
        opened = _open(file)
        for entry in of_file:
            yield entry, opened.get_slice(entry.theirs)


def _open(file: Path) -> Any:
    package = _package()
    try:
        return package.safe_open(file, framework="pt")
    except (package.SafetensorError, FileNotFoundError) as error:
        raise UsageError(f"{file} is damaged or missing: {error}; fetch it again") from error


def _package() -> Any:
    try:
        import safetensors.torch
    except ImportError as error:
        raise UsageError("this needs the package safetensors: pip install safetensors") from error
    return safetensors


def _require_shape(entry: _Entry, shape: Sequence[int], path: StrPath) -> None:
    wanted = entry.local.piece.shape
    found = None
    with suppress(RuntimeError):  # of a transform that cannot be applied
        found = entry.transform.to_ours(torch.empty(shape, device="meta")).shape
    if found != wanted:
        raise UsageError(
            f"{entry.theirs!r} of {path} is {tuple(shape)}, which does not make {tuple(wanted)} for {entry.name!r}"
        )


@torch.no_grad()
def _fill_all(entries: Iterable[_Entry], files: Mapping[str, Path]) -> None:
    for entry, stored in _opened(entries, files):
        _fill(entry, stored)


def _fill(entry: _Entry, stored: Any) -> None:
    if not entry.local.piece.tensor.numel():
        return
    fill_piece(entry.local.piece, stored if entry.transform is AS_IT_IS else entry.transform.to_ours(stored[...]))


def fill_piece(piece: Piece, whole: Any) -> None:
    """Gives a piece its part of the whole: of a tensor, or of what reads one by slices."""
    for block in piece.blocks or (piece,):
        begins = zip(block.offset, block.tensor.shape, strict=True)
        where = tuple(slice(start, start + length) for start, length in begins)
        block.tensor.copy_(whole[where or ...])


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
        _package()
        if context.rank == 0:
            for leftover in path.glob(".part-*.safetensors"):  # of a save that was cut short
                leftover.unlink()
        entries = _entries(model, context, names, rename)
        first_names = {id(entry.local.tensor): entry.name for entry in reversed(entries)}
        told = [(entry.theirs, first_names[id(entry.local.tensor)], entry.local.spec) for entry in entries]
        everyone: list[Any] = all_gather_object(context.world, told)
        whole_model([[spec for _, _, spec in one] for one in everyone])
        writers = _writers(everyone)
        path.mkdir(parents=True, exist_ok=True)
        mine = [entry for entry in entries if context.rank in context.layout.tensor_ranks(writers[entry.theirs])]
        written: list[_Part] = []
        Task(context, lambda: written.extend(_write(path, mine, context, shard_bytes))).wait()
        parts: list[Any] = all_gather_object(context.world, written)
        if context.rank == 0:
            _publish(path, [part for one in parts for part in one])
        all_gather(context.world, [0.0])


def _writers(everyone: Sequence[Sequence[tuple[str, str, TensorSpec]]]) -> dict[str, int]:
    """The rank that writes each tensor of the files: the lowest that has it. Each rank told, of each of its tensors,
    what the files call it and the first of its names. Raises UsageError when two weights get one name.
    """
    known: dict[str, tuple[int, str, TensorSpec]] = {}
    for rank, one in enumerate(everyone):
        for theirs, first_name, spec in one:
            _, known_name, other = known.setdefault(theirs, (rank, first_name, spec))
            if first_name != known_name and (spec.tied is None or spec.tied != other.tied):
                raise UsageError(f"{other.name!r} and {spec.name!r} would both be written as {theirs!r}")
    return {theirs: rank for theirs, (rank, _, _) in known.items()}


class _Part(NamedTuple):
    """A file under its temporary name, what it has, and how many bytes of it are tensors."""

    file: str
    names: tuple[str, ...]
    bytes: int


def _write(path: Path, entries: Sequence[_Entry], context: Context, shard_bytes: int) -> list[_Part]:
    """Writes this rank's files. The tensor ranks come along, since each has a part of what is split."""
    parts: list[_Part] = []
    collected: dict[str, Tensor] = {}

    def flush() -> None:
        if collected:
            file = f".part-{context.rank}-{len(parts)}.safetensors"
            package = _package()
            try:
                package.torch.save_file(collected, path / file, metadata={"format": "pt"})
            except (OSError, package.SafetensorError) as error:
                raise UsageError(f"writing {path / file} failed: {error}") from error
            parts.append(_Part(file, tuple(collected), sum(tensor.nbytes for tensor in collected.values())))
            collected.clear()

    for entry in {entry.theirs: entry for entry in entries}.values():
        whole = _whole(entry.local, context)
        if context.tensor_rank == 0:
            stored = entry.transform.to_theirs(whole).contiguous()
            if sum(tensor.nbytes for tensor in collected.values()) + stored.nbytes > shard_bytes:
                flush()
            collected[entry.theirs] = stored
    flush()
    return parts


def _whole(local: LocalTensor, context: Context) -> Tensor:
    """The whole tensor on the CPU, in memory of its own."""
    tensor = local.tensor.detach().contiguous()
    if local.split is None:
        return tensor.to("cpu", copy=True)
    parts = tensor.new_empty(context.tensor_size * tensor.shape[0], *tensor.shape[1:])
    context.tensor.all_gather(parts, tensor).wait()
    return local.split.joined(parts.cpu().chunk(context.tensor_size))


def _publish(path: Path, parts: Sequence[_Part]) -> None:
    """Gives the files the names that Hugging Face's libraries look for, the index last."""
    old = {file.name for file in path.glob("model*.safetensors")} | {INDEX}
    files = [f"model-{index:05}-of-{len(parts):05}.safetensors" for index in range(1, len(parts) + 1)]
    files = files if len(parts) > 1 else [SINGLE]
    for part, file in zip(parts, files, strict=True):
        (path / part.file).rename(path / file)
    if len(parts) > 1:
        weight_map = {name: file for part, file in zip(parts, files, strict=True) for name in part.names}
        index = {"metadata": {"total_size": sum(part.bytes for part in parts)}, "weight_map": weight_map}
        write_durably(path / INDEX, json.dumps(index, indent=2, sort_keys=True).encode())
        files.append(INDEX)
    for name in old - set(files):
        (path / name).unlink(missing_ok=True)
