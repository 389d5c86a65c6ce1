"""Comparison: what ranks tell each other about their parameters and buffers, and whether those that several ranks hold
match. Must not contain: exchanges between ranks, and what makes values equal.
"""

from __future__ import annotations

import hashlib
from collections.abc import Container, Mapping, Sequence
from itertools import chain, zip_longest
from typing import NamedTuple

import torch
from torch import Tensor

from pipeflow.core.errors import UsageError
from pipeflow.engine.parallel.layout import WorldLayout
from pipeflow.engine.parallel.sharding import local_part
from pipeflow.engine.runtime.original import plain_name


class TensorProperties(NamedTuple):
    """The properties of a parameter or buffer. `name` is its name without torch.compile; `values` is a digest of its
    values if these can no longer be made equal, else empty. `is_new` if it was replaced since the last step, so that
    its gradient is not in the sums of the others. `is_expert` if each expert rank has values of its own.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    is_meta: bool
    values: str = ""
    is_new: bool = False
    is_expert: bool = False

    @classmethod
    def of(
        cls, name: str, tensor: Tensor, *, values: bool, new: Container[Tensor], experts: Container[int]
    ) -> TensorProperties:
        digest = _digest(tensor) if values and not tensor.is_meta else ""
        shape, is_new = tuple(tensor.shape), tensor in new
        properties = plain_name(name), shape, tensor.dtype, tensor.requires_grad, tensor.is_meta
        return cls(*properties, digest, is_new, id(tensor) in experts)

    def __str__(self) -> str:
        told = [f"shape {self.shape}", str(self.dtype), f"requires_grad={self.requires_grad}"]
        told += ["on the meta device"] * self.is_meta + [f"values of digest {self.values}"] * bool(self.values)
        told += ["replaced since the last step"] * self.is_new + ["of experts"] * self.is_expert
        return f"{self.name!r}: {', '.join(told)}"


class Description(NamedTuple):
    """The parameters and buffers of one rank.

    Attributes:
        all: all of them, by name in the Pipeline; other replicas must have the same.
        whole: those that every tensor rank has in full.
        stages: those of each stage that another rank of the pipeline has, too.
        ties: for each weight or module that users tied, the pipeline ranks that hold it, and its parameters.
    """

    all: list[TensorProperties]
    whole: list[TensorProperties]
    stages: Mapping[int, list[TensorProperties]]
    ties: list[tuple[tuple[int, ...], list[TensorProperties]]]


def compare(everyone: Sequence[Description], layout: WorldLayout) -> None:
    """Raises the same UsageError on every rank unless tensors that several ranks hold have the same properties on all
    of them.
    """
    for rank, mine in enumerate(everyone):
        first = layout.copy_ranks(rank)[0]
        _require(f"rank {rank} is a replica of rank {first}", *map(_common, (mine.all, everyone[first].all)))
        first = layout.expert_copy_ranks(rank)[0]
        _require(f"rank {rank} holds the same experts as rank {first}", mine.all, everyone[first].all)
        first = layout.tensor_ranks(rank)[0]
        _require(f"rank {rank} holds parts of the same layers as rank {first}", mine.whole, everyone[first].whole)
        pipeline = layout.pipeline_ranks(rank)
        for other in pipeline[: pipeline.index(rank)]:
            for stage in mine.stages.keys() & everyone[other].stages.keys():
                what = f"rank {rank} holds stage {stage}, as rank {other} does"
                _require(what, mine.stages[stage], everyone[other].stages[stage])
        for ranks in dict.fromkeys(ranks for ranks, _ in mine.ties):
            _compare_ties(ranks, {place: everyone[pipeline[place]] for place in ranks})


def _common(properties: Sequence[TensorProperties]) -> list[TensorProperties]:
    """The properties that all replicas have in common, without the values of experts."""
    return [each._replace(values="") if each.is_expert else each for each in properties]


def _require(what: str, found: Sequence[TensorProperties], expected: Sequence[TensorProperties]) -> None:
    for mine, its in zip_longest(found, expected):
        if mine != its:
            raise UsageError(f"{what}, but has {mine or 'nothing'}, not {its or 'nothing'}")


def _compare_ties(ranks: tuple[int, ...], holders: Mapping[int, Description]) -> None:
    registered = {
        rank: [properties for shared, properties in its.ties if shared == ranks] for rank, its in holders.items()
    }
    first = registered[ranks[0]]
    for rank, ties in registered.items():
        mine, its = ([[properties.shape for properties in tie] for tie in each] for each in (first, ties))
        if mine != its:
            raise UsageError(
                f"ranks {list(ranks)} share a weight, but rank {ranks[0]} registered shapes {mine} and rank {rank} "
                f"{its}"
            )
        for one, other in zip(chain(*first), chain(*ties), strict=True):
            if one[1:] != other[1:]:
                raise UsageError(
                    f"ranks {list(ranks)} share a weight, but rank {ranks[0]} has {one}, rank {rank} {other}"
                )


def _digest(tensor: Tensor) -> str:
    values = local_part(tensor).to("cpu", copy=True, memory_format=torch.contiguous_format)
    return hashlib.sha256(values.view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()[:16]
