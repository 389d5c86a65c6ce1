"""Description: what each rank tells the others about its parameters and buffers, and the check that they match before
gradients are summed and values shared.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from itertools import chain, zip_longest
from typing import NamedTuple

import torch
from torch import Tensor

from pipeflow.core.errors import UsageError
from pipeflow.parallel.layout import WorldLayout
from pipeflow.parallel.sharding import local_part
from pipeflow.runtime.names import plain_name


class Looks(NamedTuple):
    """The properties of a parameter or buffer. `name` is its name without torch.compile; `values` is a digest of its
    values if these can no longer be made equal, else empty.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    is_meta: bool
    values: str = ""

    @classmethod
    def of(cls, name: str, tensor: Tensor, *, values: bool = False) -> Looks:
        digest = _digest(tensor) if values and not tensor.is_meta else ""
        return cls(
            plain_name(name),
            tuple(tensor.shape),
            tensor.dtype,
            tensor.requires_grad,
            tensor.is_meta,
            digest,
        )

    def __str__(self) -> str:
        told = [f"shape {self.shape}", str(self.dtype), f"requires_grad={self.requires_grad}"]
        told += ["on the meta device"] * self.is_meta + [f"values of digest {self.values}"] * bool(self.values)
        return f"{self.name!r}: {', '.join(told)}"


class Description(NamedTuple):
    """The parameters and buffers of one rank.

    Attributes:
        all: all of them, by name in the Pipeline; other replicas must have the same.
        whole: those that every tensor rank has in full.
        stages: those of each stage that another rank of the pipeline has, too.
        ties: for each weight or module that users tied, the pipeline ranks that hold it, and its parameters.
    """

    all: list[Looks]
    whole: list[Looks]
    stages: Mapping[int, list[Looks]]
    ties: list[tuple[tuple[int, ...], list[Looks]]]


def compare(everyone: Sequence[Description], layout: WorldLayout) -> None:
    """Raises the same UsageError on every rank unless tensors that several ranks hold have the same properties on all
    of them.
    """
    for rank, mine in enumerate(everyone):
        first = layout.data_ranks(rank)[0]
        _require(f"rank {rank} is a replica of rank {first}", mine.all, everyone[first].all)
        first = layout.tensor_ranks(rank)[0]
        _require(f"rank {rank} holds parts of the same layers as rank {first}", mine.whole, everyone[first].whole)
        pipeline = layout.pipeline_ranks(rank)
        for other in pipeline[: pipeline.index(rank)]:
            for stage in mine.stages.keys() & everyone[other].stages.keys():
                what = f"rank {rank} holds stage {stage}, as rank {other} does"
                _require(what, mine.stages[stage], everyone[other].stages[stage])
        for ranks in dict.fromkeys(ranks for ranks, _ in mine.ties):
            _compare_ties(ranks, {place: everyone[pipeline[place]] for place in ranks})


def _require(what: str, found: Sequence[Looks], expected: Sequence[Looks]) -> None:
    for mine, its in zip_longest(found, expected):
        if mine != its:
            raise UsageError(f"{what}, but has {mine or 'nothing'}, not {its or 'nothing'}")


def _compare_ties(ranks: tuple[int, ...], holders: Mapping[int, Description]) -> None:
    registered = {rank: [looks for shared, looks in its.ties if shared == ranks] for rank, its in holders.items()}
    first = registered[ranks[0]]
    for rank, ties in registered.items():
        mine, its = ([[looks.shape for looks in tie] for tie in each] for each in (first, ties))
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
