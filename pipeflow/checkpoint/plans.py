"""What torch.distributed.checkpoint is told: which pieces there are to write, and to read. Its planners divide the
writing among the ranks that hold the same, and find the saved parts that make up a piece of any other layout. Its
collectives are not used, but the ranks' own agreement, so that a checkpoint needs no process group.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult

from pipeflow.checkpoint.pieces import Piece, copied
from pipeflow.core.errors import UsageError


@dataclass
class Content:
    """What a rank has to write, by name: pieces of tensors, and plain values as bytes."""

    pieces: dict[str, Piece]
    values: dict[str, bytes]

    def restricted(self, plan: SavePlan) -> Content:
        """Only what `plan` makes this rank write, in memory of its own: later changes do not reach it."""
        names = {item.index.fqn for item in plan.items}
        pieces = {name: copied(piece) for name, piece in self.pieces.items() if name in names}
        return Content(pieces, {name: value for name, value in self.values.items() if name in names})


def to_bytes(name: str, value: object) -> bytes:
    """A plain value as it is stored. Raises UsageError for one that could not be read back."""
    stream = io.BytesIO()
    try:
        torch.save(value, stream)
        from_bytes(stream.getvalue())
    except Exception as error:  # pickle's errors are of many kinds
        reason = str(error).splitlines()[0]
        raise UsageError(f"{name} holds more than plain values and tensors: convert it first ({reason})") from error
    return stream.getvalue()


def from_bytes(stored: bytes) -> Any:
    """The plain value that `to_bytes` was given."""
    return torch.load(io.BytesIO(stored), weights_only=True, map_location="cpu")


class SavePlanner(DefaultSavePlanner):
    """Plans one rank's writes."""

    def __init__(self, content: Content) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.content = content

    def create_local_plan(self) -> SavePlan:
        tensors = [
            _write_item(name, piece)
            for name, piece in self.content.pieces.items()
            if piece.tensor.numel() or not piece.shape.numel()
        ]
        values = [WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO) for name in self.content.values]
        return SavePlan([*tensors, *values])

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        name = write_item.index.fqn
        if write_item.type is WriteItemType.BYTE_IO:
            return io.BytesIO(self.content.values[name])
        return self.content.pieces[name].tensor.contiguous()


def _write_item(name: str, piece: Piece) -> WriteItem:
    chunk = ChunkStorageMetadata(piece.offset, piece.tensor.shape)
    properties = TensorProperties.create_from_tensor(piece.tensor)
    index = MetadataIndex(name, piece.offset)
    return WriteItem(index, WriteItemType.SHARD, tensor_data=TensorWriteData(chunk, properties, piece.shape))


def divide(plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
    """Every rank's part of the writing, each entry once, and the description of the whole; the same on every rank.

    Raises UsageError when the pieces of a tensor do not make up the whole.
    """
    planner = SavePlanner(Content({}, {}))
    try:
        return planner.create_global_plan(plans)
    except ValueError as error:
        raise UsageError(f"the ranks' parts of a tensor do not make up the whole: {error}") from error


def write(folder: Path, rank: int, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
    """Writes this rank's file into `folder` and waits until the disk has it. Raises OSError."""
    writer = FileSystemWriter(folder, per_thread_copy_ahead=0)
    writer.set_up_storage_writer(is_coordinator=False, rank=rank, use_collectives=False)
    results: list[WriteResult] = writer.write_data(writer.prepare_local_plan(plan), planner).wait()
    return results


def write_metadata(folder: Path, metadata: Metadata, results: list[list[WriteResult]]) -> None:
    """Says where in `folder` everything is. Raises OSError."""
    FileSystemWriter(folder).finish(metadata, results)


class LoadPlanner(DefaultLoadPlanner):
    """Plans one rank's reads: `pieces` are filled, of `names` the values are read."""

    def __init__(self, metadata: Metadata, pieces: Mapping[str, Piece], names: Iterable[str]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.metadata = metadata
        self.pieces = pieces
        self.names = tuple(names)
        self.values: dict[str, Any] = {}

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        items: list[ReadItem] = []
        for name, piece in self.pieces.items():
            saved = self.metadata.state_dict_metadata[name]
            chunk = ChunkStorageMetadata(piece.offset, piece.tensor.shape)
            if piece.tensor.numel():
                assert isinstance(saved, TensorStorageMetadata)
                items += create_read_items_for_chunk_list(name, saved, [chunk])
        return LoadPlan([*items, *map(_read_value, self.names)])

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.values[read_item.dest_index.fqn] = from_bytes(value.getvalue())

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self.pieces[index.fqn].tensor


def _read_value(name: str) -> ReadItem:
    index, nowhere = MetadataIndex(name), torch.Size([0])
    return ReadItem(LoadItemType.BYTE_IO, index, nowhere, index, nowhere, nowhere)


class Saved:
    """A checkpoint's content, open for reading.

    Attributes:
        tensors: every tensor's description, by name.
        values: the names of the plain values.
    """

    def __init__(self, folder: Path) -> None:
        self._reader = FileSystemReader(folder)
        self._metadata = self._reader.read_metadata()
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=False)
        entries = self._metadata.state_dict_metadata
        self.tensors = {name: each for name, each in entries.items() if isinstance(each, TensorStorageMetadata)}
        self.values = {name for name, each in entries.items() if isinstance(each, BytesStorageMetadata)}

    def fill(self, pieces: Mapping[str, Piece]) -> None:
        """Reads the saved values into the pieces' tensors, from as many parts as it takes."""
        with torch.no_grad():
            self._read(LoadPlanner(self._metadata, pieces, ()))

    def read(self, names: Iterable[str]) -> dict[str, Any]:
        """The plain values of these names."""
        return self._read(LoadPlanner(self._metadata, {}, names)).values

    def _read(self, planner: LoadPlanner) -> LoadPlanner:
        self._reader.read_data(planner.create_local_plan(), planner).wait()
        return planner
