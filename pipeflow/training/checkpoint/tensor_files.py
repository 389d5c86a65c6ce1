"""safetensors files: a folder with one file, or with several and an index. They are read by slices, and written by all
ranks together. Must not contain: names in other libraries.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from pipeflow.core.errors import UsageError
from pipeflow.engine.parallel.context import Context
from pipeflow.engine.parallel.sharding import is_distributed
from pipeflow.engine.parallel.transport.agreement import all_gather, all_gather_object
from pipeflow.training.checkpoint import folders
from pipeflow.training.checkpoint.folders import WEIGHTS, alone
from pipeflow.training.checkpoint.manifest import file_name, read_json
from pipeflow.training.checkpoint.pieces import LocalTensor, Piece, TensorSpec, whole_model
from pipeflow.training.checkpoint.task import Task, require_same

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
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
            self._open = file, opened_file(file)
        try:
            return self._open[1].get_slice(name)
        except package().SafetensorError as error:
            raise UsageError(f"{file} has no {name!r}, although the index lists it: download it again") from error

    def by_file(self, names: Sequence[str]) -> list[str]:
        """The names in an order in which each file is opened once."""
        return sorted(names, key=lambda name: (self.files[name], name))


def _files_of(path: Path) -> dict[str, Path]:
    if path.is_dir() and (path / INDEX).is_file():
        return {name: path / file for name, file in read_index(path / INDEX)["weight_map"].items()}
    file = path / SINGLE if path.is_dir() else path
    if not file.is_file():
        raise UsageError(f"{path} has no weights: pass a .safetensors file, or a folder with {SINGLE} or {INDEX}")
    with opened_file(file) as opened:
        return dict.fromkeys(opened.keys(), file)


def read_index(file: Path) -> dict[str, Any]:
    """The content of an index; its "weight_map" has names of files in its folder. Raises UsageError for any other."""
    return read_json(file, file.read_bytes, _checked_index, advice="download it again")


def _checked_index(content: Any) -> dict[str, Any]:
    files = content["weight_map"]
    if not isinstance(content, dict) or not isinstance(files, dict):
        raise ValueError("its weight_map does not map names to files")
    for file in set(map(file_name, files.values())):
        if not file.endswith(".safetensors"):
            raise ValueError(f"{file!r} is not a safetensors file")
    return content


def opened_file(file: Path) -> Any:
    """A safetensors file, open for reading. Raises UsageError if it is damaged or missing."""
    try:
        if not file.is_file():  # a pipe would never end
            raise FileNotFoundError(f"{file} is no file")
        return package().safe_open(file, framework="pt")
    except (package().SafetensorError, OSError) as error:
        raise UsageError(f"{file} is damaged or missing: {error}; download it again") from error


def package() -> Any:
    """Imports the package safetensors. Raises UsageError if it is not installed."""
    try:
        import safetensors.torch
    except ImportError as error:
        raise UsageError("this needs the package safetensors: pip install safetensors") from error
    return safetensors


@torch.no_grad()
def fill_pieces(pieces: Iterable[Piece], whole: Any) -> None:
    """Fills pieces of a tensor from the whole: a tensor, or an object that reads one by slices."""
    for piece in pieces:
        if piece.tensor.numel():
            begins = zip(piece.offset, piece.tensor.shape, strict=True)
            where = tuple(slice(start, start + length) for start, length in begins)
            piece.tensor.copy_(whole[where or ...])


_WRITER = {"writer": "pipeflow"}


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
    fully_shard from all replicas. Files are written in a hidden folder and renamed when all are written; if that fails,
    existing files stay. If all tensors fit in `shard_bytes`, the first rank joins the files.

    Args:
        path: the folder.
        outputs: this rank's tensors.
        context: this rank's context.
        shard_bytes: maximum size of a file in bytes, unless a single weight is larger.
        beside: called on the first rank with a folder to write further files to.

    Raises UsageError if ranks pass different paths, if two weights get one name, if the folder has weights of something
    else, and on a rank that could not write.
    """
    package()
    require_same(context, {"path": str(path)})
    is_new = not path.is_dir()
    if context.rank == 0:
        _require_free(path)
    try:
        with parts_together(path / SINGLE, outputs, context, shard_bytes=shard_bytes) as parts:
            if context.rank == 0:
                _require_ours(path, {name for part in parts for name in part.names})
                _publish(path, _joined(parts, shard_bytes), _files_of_others(beside))
            all_gather(context.world, [0.0])
    except OSError as error:
        raise UsageError(f"{path} could not be written: {error}") from error
    finally:
        if is_new and context.rank == 0:
            with suppress(OSError):  # if it is not empty
                path.rmdir()


@contextmanager
def parts_together(
    path: Path, outputs: Sequence[OutputTensor], context: Context, *, shard_bytes: int
) -> Iterator[list[OutputFile]]:
    """Context manager that yields files with all `outputs`, in a hidden folder beside `path`; an empty list on ranks
    other than the first. All ranks enter and leave it together, inside `alarm.raised_everywhere()`. It is like
    `write_together` otherwise.
    """
    first_names = {id(output.local.tensor): output.local.name for output in reversed(outputs)}
    told = [(output.names, first_names[id(output.local.tensor)], output.local.spec) for output in outputs]
    everyone: list[Any] = all_gather_object(context.world, told)
    whole_model([[spec for _, _, spec in one] for one in everyone])
    writers = _writers(everyone)
    mine = [
        output
        for output in outputs
        if context.rank in _givers(output.local, writers[output.names], context) or is_distributed(output.local.tensor)
    ]
    written: list[OutputFile] = []
    with parts_folder(path, context) as folder:
        Task(context, lambda: written.extend(_write(folder, mine, writers, context, shard_bytes))).wait()
        everyones: list[Any] = all_gather_object(context.world, written)
        yield [OutputFile(*part) for one in everyones for part in one] if context.rank == 0 else []


@contextmanager
def parts_folder(path: Path, context: Context) -> Iterator[Path]:
    """Context manager that yields a hidden folder beside `path`, into which all ranks write files that are then joined
    or renamed. They enter and leave it together; the last one removes the folder.

    Raises UsageError on a rank that cannot make it.
    """
    begun = None
    try:
        if context.rank == 0:
            begun = folders.begin(path)
            folders.clean(path.parent, begun[0].stat().st_mtime)
        names: list[Any] = all_gather_object(context.world, begun and begun[0].name)
        folder = path.with_name(names[0])
        hold = begun[1] if begun else folders.join(folder)
    except OSError as error:
        raise UsageError(f"{path} could not be written: {error}") from error
    try:
        yield folder
    finally:
        hold.release()
        folders.discard(folder)


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


class OutputFile(NamedTuple):
    """The path of a file in the hidden folder, the names of its tensors, and their size in bytes."""

    file: str
    names: tuple[str, ...]
    bytes: int


def _write(
    path: Path,
    outputs: Sequence[OutputTensor],
    writers: Mapping[tuple[str, ...], int],
    context: Context,
    shard_bytes: int,
) -> list[OutputFile]:
    """Writes this rank's files. Ranks that hold a part of one of its tensors take part too."""
    parts: list[OutputFile] = []
    collected: dict[str, Tensor] = {}

    def flush() -> None:
        if collected:
            parts.append(_written(path / f"part-{context.rank}-{len(parts)}.safetensors", collected))
            collected.clear()

    for output in {output.names: output for output in outputs}.values():
        whole = _whole(output.local)
        if context.rank == writers[output.names]:
            stored = {name: tensor.contiguous() for name, tensor in output.stored(whole).items()}
            more = sum(tensor.nbytes for tensor in stored.values())
            if sum(tensor.nbytes for tensor in collected.values()) + more > shard_bytes:
                flush()
            collected |= stored
    flush()
    return parts


def _written(file: Path, tensors: dict[str, Tensor]) -> OutputFile:
    try:
        package().torch.save_file(tensors, file, metadata={"format": "pt", **_WRITER})
    except (OSError, package().SafetensorError) as error:
        raise UsageError(f"{file} could not be written: {error}") from error
    return OutputFile(str(file), tuple(tensors), sum(tensor.nbytes for tensor in tensors.values()))


def _joined(parts: list[OutputFile], shard_bytes: int) -> list[OutputFile]:
    """The parts of all ranks in one file, if they fit in one."""
    if len(parts) < 2 or sum(part.bytes for part in parts) > shard_bytes:
        return parts
    tensors: dict[str, Tensor] = {}
    for part in parts:
        tensors |= package().torch.load_file(part.file)
    return [_written(Path(parts[0].file).with_name(SINGLE), tensors)]


def _whole(local: LocalTensor) -> Tensor:
    """A copy of the whole tensor on the CPU."""
    tensor = local.tensor.detach()
    tensor = (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).contiguous()
    for split, group in local.splits:
        part = tensor.to(local.tensor.device).contiguous()
        parts = part.new_empty(group.size * part.shape[0], *part.shape[1:])
        group.all_gather(parts, part).wait()
        tensor = split.joined(parts.cpu().chunk(group.size))
    return tensor.to("cpu", copy=not local.splits)


def _givers(local: LocalTensor, writer: int, context: Context) -> set[int]:
    """The ranks that put a tensor together for `writer`, and that rank."""
    layout, ranks = context.layout, {writer}
    for _, group in local.splits:
        others = layout.tensor_ranks if group is context.tensor else layout.expert_ranks
        ranks = {other for rank in ranks for other in others(rank)}
    return ranks


def _require_free(path: Path) -> None:
    """Raises UsageError if something is at `path` that is not a folder."""
    if (path.is_symlink() or path.exists()) and not path.is_dir():
        raise UsageError(f"{path} is not a folder: pass a new folder for the weights; nothing was saved")


def _require_ours(path: Path, names: Collection[str]) -> None:
    """Raises UsageError if a file in the folder that would be replaced has other tensors than `names`, and was not
    written by pipeflow.
    """
    for file in path.iterdir():
        if WEIGHTS.fullmatch(file.name) and not _is_ours(file, names):
            raise UsageError(
                f"{file} has other weights than the model, and was not written by pipeflow: save to a new folder, or "
                "remove the file; nothing was saved"
            )


def _is_ours(file: Path, names: Collection[str]) -> bool:
    """True if pipeflow wrote the file, or if all of its tensors are among `names`, so that it has this model."""
    if file.is_symlink() or not file.is_file():
        return False
    with suppress(UsageError):
        if file.name == INDEX:
            content = read_index(file)
            told, found = content.get("metadata"), content["weight_map"]
        else:
            with opened_file(file) as opened:
                told, found = opened.metadata(), opened.keys()
        return (isinstance(told, dict) and _WRITER.items() <= told.items()) or set(found) <= set(names)
    return False


def _files_of_others(beside: Callable[[Path], None] | None) -> dict[str, bytes]:
    """The files that `beside` writes, by name."""
    with tempfile.TemporaryDirectory() as folder:
        if beside is not None:
            beside(Path(folder))
        return {file.name: file.read_bytes() for file in Path(folder).iterdir()}


def _publish(path: Path, parts: Sequence[OutputFile], others: Mapping[str, bytes]) -> None:
    """Renames the files to the names that Hugging Face's libraries expect, the index last. The old index goes first, so
    that it never lists files of two models.
    """
    files = [f"model-{index:05}-of-{len(parts):05}.safetensors" for index in range(1, len(parts) + 1)]
    files = files if len(parts) > 1 else [SINGLE]
    with alone(path):
        (path / INDEX).unlink(missing_ok=True)
        for part, file in zip(parts, files, strict=True):
            Path(part.file).rename(path / file)
        for name, content in others.items():
            folders.write_durably(path / name, content)
        if len(parts) > 1:
            weight_map = {name: file for part, file in zip(parts, files, strict=True) for name in part.names}
            told = {"total_size": sum(part.bytes for part in parts), **_WRITER}
            index = {"metadata": told, "weight_map": weight_map}
            folders.write_durably(path / INDEX, json.dumps(index, indent=2, sort_keys=True).encode())
            files.append(INDEX)
        for old in list(path.iterdir()):
            if WEIGHTS.fullmatch(old.name) and old.name not in files:
                old.unlink()
