"""Pieces: this rank's parts of a model's tensors, by name in the whole model and offset in the whole tensor. A
checkpoint consists of pieces, so it is independent of the layout.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from pipeflow.checkpoint.task import context_here
from pipeflow.core.errors import UsageError
from pipeflow.parallel.context import Context
from pipeflow.parallel.sharding import Split, splits_of
from pipeflow.runtime.buffers import ranks_of_buffers
from pipeflow.runtime.gradients.ties import ranks_of_tied
from pipeflow.runtime.names import plain_name
from pipeflow.runtime.pipeline import Pipeline

Names = Callable[[int, str], str]
"""`names(stage, name)` returns the name in the whole model of the tensor that a stage's module calls `name`."""

Sizes = tuple[int, ...]
_BLOCK = "\0"  # between the name of a tensor and the number of a block


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a tensor: its values, their offset in the whole, and the whole's shape. If the values are not
    contiguous in the whole, they consist of `blocks` that are, and the offset has no meaning.
    """

    tensor: Tensor
    offset: torch.Size
    shape: torch.Size
    blocks: tuple[Piece, ...] = ()

    def copied(self) -> Piece:
        """A copy on the CPU."""
        return Piece(self.tensor.detach().to("cpu", copy=True), self.offset, self.shape)

    @classmethod
    def whole(cls, tensor: Tensor) -> Piece:
        return cls(tensor, torch.Size([0] * tensor.dim()), tensor.shape)

    @classmethod
    def distributed(cls, tensor: DTensor) -> Piece:
        """This rank's part of a DTensor."""
        _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
        return cls(tensor.to_local(), torch.Size(offset), tensor.shape)

    @classmethod
    def of(cls, tensor: Tensor, split: Split, rank: int) -> Piece:
        """The part of a split tensor on tensor rank `rank`, without padding."""
        offset, shape = [0] * tensor.dim(), list(tensor.shape)
        if split.blocks:
            shape[split.dim] = split.size
            return cls(tensor, torch.Size(offset), torch.Size(shape), tuple(_blocks(tensor, split, rank, shape)))
        offset[split.dim], shape[split.dim] = min(rank * tensor.shape[split.dim], split.size), split.size
        return cls(split.unpadded(tensor, rank), torch.Size(offset), torch.Size(shape))


def _blocks(tensor: Tensor, split: Split, rank: int, shape: Sequence[int]) -> Iterator[Piece]:
    ranks, begin = split.size // tensor.shape[split.dim], 0
    parts = tensor.split([size // ranks for size in split.blocks], split.dim)
    for size, part in zip(split.blocks, parts, strict=True):
        offset = [0] * tensor.dim()
        offset[split.dim] = begin + rank * part.shape[split.dim]
        yield Piece(part, torch.Size(offset), torch.Size(shape))
        begin += size


def apart(pieces: Mapping[str, Piece]) -> dict[str, Piece]:
    """The pieces, with those made of blocks replaced by their blocks, each under its own name."""
    found: dict[str, Piece] = {}
    for name, piece in pieces.items():
        blocks = {f"{name}{_BLOCK}{index}": block for index, block in enumerate(piece.blocks)}
        found |= blocks or {name: piece}
    return found


def name_of_whole(name: str) -> str:
    """The name of a piece's tensor, from the piece's name in the result of `apart`."""
    return name.partition(_BLOCK)[0]


@dataclass(frozen=True, slots=True)
class LocalTensor:
    """A parameter or buffer of one of this rank's stages; `split` is None if every tensor rank has the whole."""

    name: str
    stage: int
    tensor: Tensor
    split: Split | None
    tied: tuple[int, ...] | None
    rank: int

    @property
    def is_parameter(self) -> bool:
        return isinstance(self.tensor, nn.Parameter)

    @property
    def piece(self) -> Piece:
        return self.piece_of(self.tensor)

    def piece_of(self, tensor: Tensor) -> Piece:
        """The piece for another tensor of the same shape that is split in the same way."""
        tensor = tensor.detach()
        if isinstance(tensor, DTensor):
            return Piece.distributed(tensor)
        return Piece.whole(tensor) if self.split is None else Piece.of(tensor, self.split, self.rank)

    @property
    def spec(self) -> TensorSpec:
        return TensorSpec(self.name, self.stage, tuple(self.piece.shape), self.tied)


class TensorSpec(NamedTuple):
    """A tensor's description for other ranks; `tied` has the ranks of the pipeline that share it, if any."""

    name: str
    stage: int
    shape: tuple[int, ...]
    tied: tuple[int, ...] | None


def context_of(model: nn.Module) -> Context:
    """The context of `model`'s ranks; without a launch, a world of one."""
    if isinstance(model, Pipeline):
        return model.context
    return context_here()


def local_tensors(model: nn.Module, context: Context, names: Names | None) -> list[LocalTensor]:
    """All parameters and persistent buffers of this rank. A tensor with several names is listed under each.

    Raises UsageError if two of this rank's stages use one name for two tensors.
    """
    splits = splits_of(model)
    tied = ranks_of_tied(model) | ranks_of_buffers(model)
    found: dict[str, LocalTensor] = {}
    for stage, module in _stages(model, context):
        for own, tensor in module.state_dict(keep_vars=True).items():
            plain = plain_name(own)
            name = plain if names is None else names(stage, plain)
            if not isinstance(tensor, Tensor):
                raise UsageError(f"{name!r} is a {type(tensor).__name__}; a checkpoint can only hold plain tensors")
            key = id(tensor)
            local = LocalTensor(name, stage, tensor, splits.get(key), tied.get(key), context.tensor_rank)
            if found.setdefault(name, local).tensor is not tensor:
                raise _collision(name, found[name].stage, stage)
    return list(found.values())


def _stages(model: nn.Module, context: Context) -> Iterator[tuple[int, nn.Module]]:
    if isinstance(model, Pipeline):
        stages = model.schedule.placement.stages_of(context.pipeline_rank)
        yield from zip(stages, model.chunks, strict=True)
        if model.criterion is not None:
            yield stages[-1], nn.ModuleDict({"criterion": model.criterion})
    else:
        yield 0, model


def whole_model(everyone: Sequence[Sequence[tuple[Any, ...]]]) -> dict[str, TensorSpec]:
    """The tensors of the whole model by name, from each rank's TensorSpecs.

    Raises UsageError if two stages use one name for two tensors, or if ranks disagree on a shape.
    """
    by_name: dict[str, TensorSpec] = {}
    for each in (TensorSpec(*spec) for one in everyone for spec in one):
        first = by_name.setdefault(each.name, each)
        if first.stage != each.stage and (first.tied is None or first.tied != each.tied):
            raise _collision(each.name, first.stage, each.stage)
        if first.shape != each.shape:
            raise UsageError(f"{each.name!r} has shape {first.shape} on one rank and {each.shape} on another")
    return by_name


def _collision(name: str, stage: int, other: int) -> UsageError:
    return UsageError(
        f"stages {stage} and {other} both have a tensor named {name!r}: name blocks by their index in the whole model, "
        "with nn.ModuleDict, or pass names=lambda stage, name: ..."
    )


def require_same_model(path: object, model: Mapping[str, Sizes], saved: Mapping[str, Sizes]) -> None:
    """Raises UsageError that names the first tensors whose name or shape differs from the saved ones."""
    differences = [
        *(f"it has no {name!r}" for name in model if name not in saved),
        *(f"its {name!r} is not in the model" for name in saved if name not in model),
        *(
            f"its {name!r} is {saved[name]}, not {shape}"
            for name, shape in model.items()
            if saved.get(name, shape) != shape
        ),
    ]
    if differences:
        more = f"; and {len(differences) - 5} more" if len(differences) > 5 else ""
        raise UsageError(f"{path} is a checkpoint of another model: {'; '.join(differences[:5])}{more}")


def state_piece(local: LocalTensor, key: str, tensor: Tensor) -> Piece:
    """The piece for an optimizer's state of a parameter. A state of the parameter's shape is split like the parameter;
    any other is whole on every rank. Raises UsageError for a state of another shape if the parameter is split.
    """
    if tensor.shape == local.tensor.shape:
        return local.piece_of(tensor)
    if local.split is not None and tensor.numel() != 1:
        raise UsageError(
            f"the optimizer's state {key!r} of {local.name!r} has shape {tuple(tensor.shape)}, and the parameter is "
            "split over tensor ranks: use an optimizer whose states have the parameter's shape"
        )
    return Piece.whole(tensor.detach())


def grouped(tensors: Sequence[LocalTensor]) -> dict[int, list[LocalTensor]]:
    """The tensors grouped by id, so that all names of a tied one are together."""
    groups: dict[int, list[LocalTensor]] = defaultdict(list)
    for each in tensors:
        groups[id(each.tensor)].append(each)
    return groups
