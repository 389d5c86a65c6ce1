"""The files of safetensors: a folder of one, or of several with an index. They are read by slices, and written by all
ranks together. What must not live here: what weights are called elsewhere.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipeflow.checkpoint.folders import write_durably
from pipeflow.checkpoint.pieces import LocalTensor, Piece, TensorSpec, whole_model
from pipeflow.checkpoint.task import Task
from pipeflow.core.errors import UsageError
from pipeflow.parallel.context import Context
from pipeflow.parallel.transport.agreement import all_gather, all_gather_object

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
_PART, _BESIDE = ".part-", ".part-beside"
StrPath = str | os.PathLike[str]


class TensorFiles:
    """The tensors of a file, or of a folder, by their names. One file is open at a time: ask for the tensors of one
    after the other.

    Attributes:
        files: by the name of each tensor, its file.

    Raises UsageError where there are none, and where the package safetensors is not installed.
    """

    def __init__(self, path: Path) -> None:
        self.files = _files_of(path)
        self._open: tuple[Path, Any] | None = None

    def __getitem__(self, name: str) -> Any:
        """What reads the tensor, or parts of it, by slices; `[...]` is all of it. Raises UsageError where the file does
        not have what the index says.
        """
        file = self.files[name]
        if self._open is None or self._open[0] != file:
            self._open = file, _open(file)
        try:
            return self._open[1].get_slice(name)
        except package().SafetensorError as error:
            raise UsageError(f"{file} has no {name!r}, which the index says it has: fetch it again") from error

    def by_file(self, names: Sequence[str]) -> list[str]:
        """In an order in which each file is opened once."""
        return sorted(names, key=lambda name: (self.files[name], name))


def _files_of(path: Path) -> dict[str, Path]:
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


def _open(file: Path) -> Any:
    try:
        return package().safe_open(file, framework="pt")
    except (package().SafetensorError, FileNotFoundError) as error:
        raise UsageError(f"{file} is damaged or missing: {error}; fetch it again") from error


def package() -> Any:
    """The package safetensors. Raises UsageError where it is not installed."""
    try:
        import safetensors.torch
    except ImportError as error:
        raise UsageError("this needs the package safetensors: pip install safetensors") from error
    return safetensors


@torch.no_grad()
def fill_piece(piece: Piece, whole: Any) -> None:
    """Gives a piece its part of the whole: of a tensor, or of what reads one by slices."""
    if not piece.tensor.numel():
        return
    for block in piece.blocks or (piece,):
        begins = zip(block.offset, block.tensor.shape, strict=True)
        where = tuple(slice(start, start + length) for start, length in begins)
        block.tensor.copy_(whole[where or ...])


@dataclass(frozen=True, slots=True)
class Output:
    """A tensor of this rank, the names that the files have for what it becomes, and how it becomes that."""

    local: LocalTensor
    names: tuple[str, ...]
    stored: Callable[[Tensor], Mapping[str, Tensor]]


def write_together(
    path: Path,
    outputs: Sequence[Output],
    context: Context,
    *,
    shard_bytes: int,
    beside: Callable[[Path], None] | None = None,
) -> None:
    """Writes the files of a model to the folder `path`; all ranks call it together, inside the alarm, each with what it
    holds. The first replica writes; each of its pipeline ranks puts its split weights together one at a time, and holds
    at most `shard_bytes` of them. Files are written under hidden names, and get their own when all are written; where
    that fails, what was there stays.

    Args:
        beside: writes more files into the folder that it is given, on the first rank.

    Raises UsageError when two weights get one name, and on the rank that could not write.
    """
    package()
    first_names = {id(output.local.tensor): output.local.name for output in reversed(outputs)}
    told = [(output.names, first_names[id(output.local.tensor)], output.local.spec) for output in outputs]
    everyone: list[Any] = all_gather_object(context.world, told)
    whole_model([[spec for _, _, spec in one] for one in everyone])
    writers = _writers(everyone)
    mine = [output for output in outputs if context.rank in context.layout.tensor_ranks(writers[output.names])]
    is_new = not path.is_dir()
    written: list[_Part] = []

    def work() -> None:
        path.mkdir(parents=True, exist_ok=True)
        written.extend(_write(path, mine, context, shard_bytes))
        if context.rank == 0 and beside is not None:
            (path / _BESIDE).mkdir()
            beside(path / _BESIDE)

    try:
        if context.rank == 0:
            _discard(path, "*")  # of a save that was cut short
        all_gather(context.world, [0.0])
        Task(context, work).wait()
        parts: list[Any] = all_gather_object(context.world, written)
        if context.rank == 0:
            _publish(path, [part for one in parts for part in one])
        all_gather(context.world, [0.0])
    except BaseException:
        _discard(path, f"{context.rank}-*")
        if context.rank == 0:
            shutil.rmtree(path / _BESIDE, ignore_errors=True)
            if is_new:
                with suppress(OSError):  # where it is not empty
                    path.rmdir()
        raise


def _discard(path: Path, ranks: str) -> None:
    for leftover in path.glob(f"{_PART}{ranks}.safetensors"):
        leftover.unlink(missing_ok=True)
    if ranks == "*":
        shutil.rmtree(path / _BESIDE, ignore_errors=True)


def _writers(everyone: Sequence[Sequence[tuple[tuple[str, ...], str, TensorSpec]]]) -> dict[tuple[str, ...], int]:
    """The rank that writes each tensor: the lowest that has it. Each rank told, of each of its tensors, what the files
    call it and the first of its names. Raises UsageError when two weights get one name.
    """
    known: dict[str, tuple[int, str, TensorSpec]] = {}
    found: dict[tuple[str, ...], int] = {}
    for rank, one in enumerate(everyone):
        for theirs, first_name, spec in one:
            found.setdefault(theirs, rank)
            for name in theirs:
                _, known_name, other = known.setdefault(name, (rank, first_name, spec))
                if first_name != known_name and (spec.tied is None or spec.tied != other.tied):
                    raise UsageError(f"{other.name!r} and {spec.name!r} would both be written as {name!r}")
    return found


class _Part(NamedTuple):
    """A file under its temporary name, what it has, and how many bytes of it are tensors."""

    file: str
    names: tuple[str, ...]
    bytes: int


def _write(path: Path, outputs: Sequence[Output], context: Context, shard_bytes: int) -> list[_Part]:
    """Writes this rank's files. The tensor ranks come along, since each has a part of what is split."""
    parts: list[_Part] = []
    collected: dict[str, Tensor] = {}

    def flush() -> None:
        if collected:
            file = f"{_PART}{context.rank}-{len(parts)}.safetensors"
            try:
                package().torch.save_file(collected, path / file, metadata={"format": "pt"})
            except (OSError, package().SafetensorError) as error:
                raise UsageError(f"writing {path / file} failed: {error}") from error
            parts.append(_Part(file, tuple(collected), sum(tensor.nbytes for tensor in collected.values())))
            collected.clear()

    for output in {output.names: output for output in outputs}.values():
        whole = _whole(output.local, context)
        if context.tensor_rank == 0:
            stored = {name: tensor.contiguous() for name, tensor in output.stored(whole).items()}
            more = sum(tensor.nbytes for tensor in stored.values())
            if sum(tensor.nbytes for tensor in collected.values()) + more > shard_bytes:
                flush()
            collected |= stored
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
    if (path / _BESIDE).is_dir():
        for more in (path / _BESIDE).iterdir():
            more.rename(path / more.name)
        (path / _BESIDE).rmdir()
    if len(parts) > 1:
        weight_map = {name: file for part, file in zip(parts, files, strict=True) for name in part.names}
        index = {"metadata": {"total_size": sum(part.bytes for part in parts)}, "weight_map": weight_map}
        write_durably(path / INDEX, json.dumps(index, indent=2, sort_keys=True).encode())
        files.append(INDEX)
    for name in old - set(files):
        (path / name).unlink(missing_ok=True)
