"""safetensors files: a folder with one file, or with several and an index. They are read by slices, and written by all
ranks together. Must not contain: names in other libraries.
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
from torch.distributed.tensor import DTensor

from pipeflow.checkpoint.folders import write_durably
from pipeflow.checkpoint.pieces import LocalTensor, Piece, TensorSpec, whole_model
from pipeflow.checkpoint.task import Task
from pipeflow.core.errors import UsageError
from pipeflow.parallel.context import Context
from pipeflow.parallel.sharding import is_distributed
from pipeflow.parallel.transport.agreement import all_gather, all_gather_object

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
_PART, _BESIDE = ".part-", ".part-beside"
StrPath = str | os.PathLike[str]


class TensorFiles:
    """The tensors of a file or folder by name. One file is open at a time, so read the tensors of one file after
    another.

    Attributes:
        files: the file of each tensor, by the tensor's name.

    Raises UsageError if there are no such files, or if the package safetensors is not installed.
    """

    def __init__(self, path: Path) -> None:
        self.files = _files_of(path)
        self._open: tuple[Path, Any] | None = None

    def __getitem__(self, name: str) -> Any:
        """An object whose slices read parts of the tensor; `[...]` reads all of it. Raises UsageError if the file lacks
        a tensor that the index lists.
        """
        file = self.files[name]
        if self._open is None or self._open[0] != file:
            self._open = file, _open(file)
        try:
            return self._open[1].get_slice(name)
        except package().SafetensorError as error:
            raise UsageError(f"{file} has no {name!r}, although the index lists it: download it again") from error

    def by_file(self, names: Sequence[str]) -> list[str]:
        """The names in an order in which each file is opened once."""
        return sorted(names, key=lambda name: (self.files[name], name))


def _files_of(path: Path) -> dict[str, Path]:
    if path.is_dir() and (path / INDEX).is_file():
        try:
            return {name: path / file for name, file in json.loads((path / INDEX).read_bytes())["weight_map"].items()}
        except (KeyError, AttributeError, json.JSONDecodeError) as error:
            raise UsageError(f"{path / INDEX} is damaged: {error!r}; download it again") from error
    file = path / SINGLE if path.is_dir() else path
    if not file.is_file():
        raise UsageError(f"{path} has no weights: pass a .safetensors file, or a folder with {SINGLE} or {INDEX}")
    with _open(file) as opened:
        return dict.fromkeys(opened.keys(), file)


def _open(file: Path) -> Any:
    try:
        return package().safe_open(file, framework="pt")
    except (package().SafetensorError, FileNotFoundError) as error:
        raise UsageError(f"{file} is damaged or missing: {error}; download it again") from error


def package() -> Any:
    """Imports the package safetensors. Raises UsageError if it is not installed."""
    try:
        import safetensors.torch
    except ImportError as error:
        raise UsageError("this needs the package safetensors: pip install safetensors") from error
    return safetensors


@torch.no_grad()
def fill_piece(piece: Piece, whole: Any) -> None:
    """Fills a piece from the whole: a tensor, or an object that reads one by slices."""
    if not piece.tensor.numel():
        return
    for block in piece.blocks or (piece,):
        begins = zip(block.offset, block.tensor.shape, strict=True)
        where = tuple(slice(start, start + length) for start, length in begins)
        block.tensor.copy_(whole[where or ...])


@dataclass(frozen=True, slots=True)
class OutputTensor:
    """A tensor of this rank with its `names` in the files; `stored` makes the tensors to store from the whole."""

    local: LocalTensor
    names: tuple[str, ...]
    stored: Callable[[Tensor], Mapping[str, Tensor]]


def write_together(
    path: Path,
    outputs: Sequence[OutputTensor],
    context: Context,
    *,
    shard_bytes: int,
    beside: Callable[[Path], None] | None = None,
) -> None:
    """Writes a model's files to the folder `path`. All ranks call it together, inside `alarm.raised_everywhere()`.

    The first replica writes: each of its pipeline ranks gathers its split weights one at a time, and those under
    fully_shard from all replicas. Files are written under hidden names and renamed when all are written; if that fails,
    existing files stay. If all tensors fit in `shard_bytes`, the first rank joins the files.

    Args:
        path: the folder.
        outputs: this rank's tensors.
        context: this rank's context.
        shard_bytes: maximum size of a file in bytes, unless a single weight is larger.
        beside: called on the first rank with a folder to write further files to.

    Raises UsageError if two weights get one name, and on a rank that could not write.
    """
    package()
    first_names = {id(output.local.tensor): output.local.name for output in reversed(outputs)}
    told = [(output.names, first_names[id(output.local.tensor)], output.local.spec) for output in outputs]
    everyone: list[Any] = all_gather_object(context.world, told)
    whole_model([[spec for _, _, spec in one] for one in everyone])
    writers = _writers(everyone)
    mine = [
        output
        for output in outputs
        if context.rank in context.layout.tensor_ranks(writers[output.names]) or is_distributed(output.local.tensor)
    ]
    is_new = not path.is_dir()
    written: list[_Part] = []

    def work() -> None:
        path.mkdir(parents=True, exist_ok=True)
        written.extend(_write(path, mine, writers, context, shard_bytes))
        if context.rank == 0 and beside is not None:
            (path / _BESIDE).mkdir()
            beside(path / _BESIDE)

    try:
        if context.rank == 0:
            _discard(path, "*")  # left by an interrupted save
        all_gather(context.world, [0.0])
        Task(context, work).wait()
        parts: list[Any] = all_gather_object(context.world, written)
        if context.rank == 0:
            _publish(path, _joined(path, [part for one in parts for part in one], shard_bytes))
        all_gather(context.world, [0.0])
    except BaseException:
        _discard(path, f"{context.rank}-*")
        if context.rank == 0:
            shutil.rmtree(path / _BESIDE, ignore_errors=True)
            if is_new:
                with suppress(OSError):  # if it is not empty
                    path.rmdir()
        raise


def _discard(path: Path, ranks: str) -> None:
    for leftover in path.glob(f"{_PART}{ranks}.safetensors"):
        leftover.unlink(missing_ok=True)
    if ranks == "*":
        shutil.rmtree(path / _BESIDE, ignore_errors=True)


def _writers(everyone: Sequence[Sequence[tuple[tuple[str, ...], str, TensorSpec]]]) -> dict[tuple[str, ...], int]:
    """The rank that writes each tensor: the lowest that has it. `everyone` has for each rank, and each of its tensors,
    the names in the files, the first name, and the spec. Raises UsageError if two weights get one name.
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
    """A file under its temporary name, the names of its tensors, and their size in bytes."""

    file: str
    names: tuple[str, ...]
    bytes: int


def _write(
    path: Path,
    outputs: Sequence[OutputTensor],
    writers: Mapping[tuple[str, ...], int],
    context: Context,
    shard_bytes: int,
) -> list[_Part]:
    """Writes this rank's files. Ranks that hold a part of one of its tensors take part too."""
    parts: list[_Part] = []
    collected: dict[str, Tensor] = {}

    def flush() -> None:
        if collected:
            parts.append(_written(path, f"{_PART}{context.rank}-{len(parts)}.safetensors", collected))
            collected.clear()

    for output in {output.names: output for output in outputs}.values():
        whole = _whole(output.local, context)
        if context.rank == writers[output.names]:
            stored = {name: tensor.contiguous() for name, tensor in output.stored(whole).items()}
            more = sum(tensor.nbytes for tensor in stored.values())
            if sum(tensor.nbytes for tensor in collected.values()) + more > shard_bytes:
                flush()
            collected |= stored
    flush()
    return parts


def _written(path: Path, file: str, tensors: dict[str, Tensor]) -> _Part:
    try:
        package().torch.save_file(tensors, path / file, metadata={"format": "pt"})
    except (OSError, package().SafetensorError) as error:
        raise UsageError(f"{path / file} could not be written: {error}") from error
    return _Part(file, tuple(tensors), sum(tensor.nbytes for tensor in tensors.values()))


def _joined(path: Path, parts: list[_Part], shard_bytes: int) -> list[_Part]:
    """The parts of all ranks in one file, if they fit in one."""
    if len(parts) < 2 or sum(part.bytes for part in parts) > shard_bytes:
        return parts
    tensors: dict[str, Tensor] = {}
    for part in parts:
        tensors |= package().torch.load_file(path / part.file)
    whole = _written(path, f"{_PART}0-all.safetensors", tensors)
    for part in parts:
        (path / part.file).unlink()
    return [whole]


def _whole(local: LocalTensor, context: Context) -> Tensor:
    """A copy of the whole tensor on the CPU."""
    tensor = local.tensor.detach()
    tensor = (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).contiguous()
    if local.split is None:
        return tensor.to("cpu", copy=True)
    parts = tensor.new_empty(context.tensor_size * tensor.shape[0], *tensor.shape[1:])
    context.tensor.all_gather(parts, tensor).wait()
    return local.split.joined(parts.cpu().chunk(context.tensor_size))


def _publish(path: Path, parts: Sequence[_Part]) -> None:
    """Renames the files to the names that Hugging Face's libraries expect, the index last."""
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
