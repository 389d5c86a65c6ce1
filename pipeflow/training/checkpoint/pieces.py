"""Pieces: this rank's parts of a model's tensors, by name in the whole model and offset in the whole tensor. A
checkpoint consists of pieces, so it is independent of the layout.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from pipeflow.core.errors import UsageError
from pipeflow.engine.parallel.context import Context
from pipeflow.engine.parallel.sharding import Split, expert_splits_of, splits_of
from pipeflow.engine.parallel.transport.protocol import Group
from pipeflow.engine.runtime.gradients.weights import ranks_of_buffers
from pipeflow.engine.runtime.original import plain_name
from pipeflow.engine.runtime.pipeline import Pipeline
from pipeflow.engine.torch_private.distributed import compute_local_shape_and_global_offset
from pipeflow.training.checkpoint.task import context_here

Names = Callable[[int, str], str]
"""`names(stage, name)` returns the name in the whole model of the tensor that a stage's module calls `name`."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a tensor that is contiguous in the whole: its values, their offset, and the whole's shape."""

    tensor: Tensor
    offset: torch.Size
    shape: torch.Size

    @classmethod
    def whole(cls, tensor: Tensor) -> Piece:
        return cls(tensor, torch.Size([0] * tensor.dim()), tensor.shape)

    @classmethod
    def distributed(cls, tensor: DTensor) -> Piece:
        """This rank's part of a DTensor."""
        _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
        return cls(tensor.to_local(), torch.Size(offset), tensor.shape)

    def of(self, split: Split, rank: int) -> list[Piece]:
        """This piece of the part that tensor rank `rank` holds, as pieces of the whole tensor, without padding: one for
        each block of a packed weight.
        """
        if split.then is not None:
            own = replace(split, then=None)
            return [each for piece in self.of(split.then, rank) for each in piece.of(own, rank)]
        dim, length, shape, place = split.dim, self.shape[split.dim], list(self.shape), split.place(rank)
        shape[dim] = split.size
        if not split.blocks:
            start = min(place * length, split.size)
            return [self._cut(dim, 0, min(length, split.size - start), start, shape)]
        sizes = [block // (split.size // length) for block in split.blocks]  # of the part's blocks
        begins, starts = (accumulate(each, initial=0) for each in (sizes, split.blocks))
        return [
            self._cut(dim, begin, size, start + place * size, shape)
            for begin, size, start in zip(begins, sizes, starts, strict=False)
        ]

    def _cut(self, dim: int, begin: int, length: int, start: int, shape: Sequence[int]) -> Piece:
        """The part of this piece in `length` entries along `dim` from `begin` on, the whole's from `start` on."""
        here, held = self.offset[dim], self.tensor.shape[dim]
        first, end = (min(max(place, here), here + held) for place in (begin, begin + length))
        offset = list(self.offset)
        offset[dim] = max(0, start + first - begin)
        return Piece(self.tensor.narrow(dim, first - here, end - first), torch.Size(offset), torch.Size(shape))


Pieces = Mapping[str, Sequence[Piece]]
"""This rank's pieces of tensors, by the names of these."""


def wholes(tensors: Mapping[str, Tensor]) -> Pieces:
    """The pieces of tensors that this rank has whole."""
    return {name: [Piece.whole(tensor)] for name, tensor in tensors.items()}


@dataclass(frozen=True, slots=True)
class LocalTensor:
    """A parameter or buffer of one of this rank's stages.

    Attributes:
        name: name in the whole model.
        stage: the stage.
        tensor: this rank's part.
        tied: the ranks of the pipeline that share it, if users tied it.
        splits: how it is split, and over which ranks: over tensor ranks, over expert ranks, or over both.
    """

    name: str
    stage: int
    tensor: Tensor
    tied: tuple[int, ...] | None
    splits: tuple[tuple[Split, Group], ...]

    @property
    def is_parameter(self) -> bool:
        return isinstance(self.tensor, nn.Parameter)

    @property
    def shape(self) -> torch.Size:
        """The shape of the whole tensor."""
        shape: Sequence[int] = self.tensor.shape
        for split, _ in self.splits:
            shape = split.whole_shape(shape)
        return torch.Size(shape)

    @property
    def pieces(self) -> list[Piece]:
        return self.pieces_of(self.tensor)

    def pieces_of(self, tensor: Tensor) -> list[Piece]:
        """The pieces of another tensor of the same shape that is split in the same way; those without entries are left
        out, unless the whole has none.
        """
        tensor = tensor.detach()
        pieces = [Piece.distributed(tensor) if isinstance(tensor, DTensor) else Piece.whole(tensor)]
        for split, group in self.splits:
            pieces = [piece for part in pieces for piece in part.of(split, group.rank)]
        return [each for each in pieces if each.tensor.numel() or not each.shape.numel()]

    @property
    def spec(self) -> TensorSpec:
        return TensorSpec(self.name, self.stage, tuple(self.shape), self.tied)


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
    if isinstance(model, Pipeline):
        model.runner.confirmation.confirm()
    states = [(stage, module.state_dict(keep_vars=True)) for stage, module in _stages(model, context)]
    # after state_dict, which makes fully_shard take back its whole parameters
    over = (splits_of(model), context.tensor), (expert_splits_of(model), context.experts)
    tied: dict[int, tuple[int, ...]] = {}
    if isinstance(model, Pipeline):
        tied |= {id(weight.parameter): weight.ranks for weight in model.gradients.weights if weight.is_tied}
        tied |= ranks_of_buffers(model.chunks, model.schedule.placement)
    found: dict[str, LocalTensor] = {}
    for stage, tensors in states:
        for own, tensor in tensors.items():
            plain = plain_name(own)
            name = plain if names is None else names(stage, plain)
            if not isinstance(tensor, Tensor):
                raise UsageError(f"{name!r} is a {type(tensor).__name__}; a checkpoint can only hold plain tensors")
            key = id(tensor)
            splits = tuple((known[key], group) for known, group in over if key in known)
            local = LocalTensor(name, stage, tensor, tied.get(key), splits)
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


Shapes = Mapping[str, tuple[int, ...]]


def require_same_model(path: object, model: Shapes, saved: Shapes) -> None:
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


def state_pieces(local: LocalTensor, key: str, tensor: Tensor, alike: Collection[str] | None = None) -> list[Piece]:
    """The pieces of an optimizer's state of a parameter. A state of the parameter's shape is split like the parameter;
    any other is whole on every rank. With `alike`, only states of these names are split.

    Raises UsageError for a state of another shape if the parameter is split, unless `alike` says that it is whole.
    """
    is_whole = alike is not None and key not in alike
    if tensor.shape == local.tensor.shape and not is_whole:
        return local.pieces_of(tensor)
    if local.splits and tensor.numel() != 1 and alike is None:
        raise UsageError(
            f"the optimizer's state {key!r} of {local.name!r} has shape {tuple(tensor.shape)}, and the parameter is "
            "split over tensor or expert ranks: use an optimizer whose states have the parameter's shape"
        )
    return [Piece.whole(tensor.detach())]
