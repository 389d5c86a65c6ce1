"""Description: what ranks tell each other of their parameters and buffers, and what must be alike before they sum
gradients and share values.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from itertools import chain, zip_longest
from typing import NamedTuple

import torch
from torch import Tensor

from pipeflow.core.errors import UsageError
from pipeflow.parallel.layout import Layout
from pipeflow.parallel.sharding import local_part
from pipeflow.runtime.names import plain_name


class Looks(NamedTuple):
    """A parameter or buffer, named as without torch.compile. `values` is a digest of its numbers, where these cannot be
    made the same any more.
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
    """What one rank holds.

    Attributes:
        all: everything, by its name in the Pipeline, which other replicas have too.
        whole: what the other tensor ranks have too.
        stages: per stage, what another rank of the pipeline that holds it has too.
        ties: per weight or module that users tied, the ranks of the pipeline that hold it, and its parameters.
    """

    all: list[Looks]
    whole: list[Looks]
    stages: Mapping[int, list[Looks]]
    ties: list[tuple[tuple[int, ...], list[Looks]]]


def compare(everyone: Sequence[Description], layout: Layout) -> None:
    """Raises UsageError, the same one on every rank, unless what several ranks hold looks alike on all of them."""
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
            raise UsageError(f"{what}, but has {mine or 'nothing'}, not {its or 'that'}")


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
