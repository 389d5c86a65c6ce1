"""What each rank tells the others about its parameters and buffers, the check that they match, and giving a tensor that
several ranks hold the same values on all of them, before the first step and when a step has changed buffers. Values are
sent as bytes, whatever the dtype.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import chain, zip_longest
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pipeflow.core.errors import UsageError
from pipeflow.engine.parallel.layout import WorldLayout
from pipeflow.engine.parallel.sharding import local_part
from pipeflow.engine.parallel.transport.agreement import exchange
from pipeflow.engine.parallel.transport.protocol import Group, Tag, Transport
from pipeflow.engine.runtime.original import plain_name


class TensorProperties(NamedTuple):
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
    def of(cls, name: str, tensor: Tensor, *, values: bool = False) -> TensorProperties:
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

    all: list[TensorProperties]
    whole: list[TensorProperties]
    stages: Mapping[int, list[TensorProperties]]
    ties: list[tuple[tuple[int, ...], list[TensorProperties]]]


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


def share_in_group(tensors: Mapping[str, Tensor], group: Group) -> list[str]:
    """Copies the tensors of the group's rank 0, or this rank's parts of them, to every rank; tensors on the meta device
    are skipped.

    Returns the names of tensors whose values changed on this rank. Raises LinkError.
    """
    if group.size == 1:
        return []
    parts = {name: local_part(tensor) for name, tensor in tensors.items() if tensor.numel() and not tensor.is_meta}
    arrived = {name: part.clone(memory_format=torch.contiguous_format) for name, part in parts.items()}
    works = [group.broadcast(_bytes_of(values), 0) for values in arrived.values()]
    for work in works:
        work.wait()
    others = [
        name for name, part in parts.items() if not torch.equal(_bytes_of(part.contiguous()), _bytes_of(arrived[name]))
    ]
    for name, part in parts.items():
        part.copy_(arrived[name])
    return others


def share_in_pipeline(tensor: Tensor, ranks: tuple[int, ...], transport: Transport) -> None:
    """Copies the values of `tensor` on the lowest of `ranks` to all of them; this rank must be one of them. Raises
    LinkError.
    """
    if tensor.is_meta or not tensor.numel():
        return
    values = local_part(tensor).clone(memory_format=torch.contiguous_format)
    row, (first, *others) = _bytes_of(values), ranks
    sent = dict.fromkeys(others, row) if transport.rank == first else {}
    arriving = {} if transport.rank == first else {first: row}
    exchange(transport, Tag.TIED, sent, arriving, "waiting for the first values of a tied weight")
    local_part(tensor).copy_(values)


def _bytes_of(values: Tensor) -> Tensor:
    """A view of the same memory as bytes."""
    return values.view(-1).view(torch.uint8)


class Buffers:
    """The buffers in the state dict of a module, and whether they were changed since they were last `seen`.

    They depend on the data, as running statistics do, so they would drift apart where ranks see different samples. The
    copies of a stage in a bidirectional schedule must leave them unchanged. Replicas all get those of the first one
    after a step, as with DistributedDataParallel.
    """

    def __init__(self, module: nn.Module) -> None:
        self._places = [
            (f"{path}.{name}".lstrip("."), layer, name)
            for path, layer in module.named_modules()
            for name, buffer in layer._buffers.items()
            if buffer is not None and name not in layer._non_persistent_buffers_set
        ]
        self.see()

    def see(self) -> None:
        """Notes what they are now."""
        self._seen = self._now()

    @property
    def are_changed(self) -> bool:
        """True if a buffer was changed or replaced on this rank."""
        return self._now() != self._seen

    def require_unchanged(self, stage: int) -> None:
        """Raises UsageError if a buffer of a stage of which another rank has a copy was changed."""
        for (path, layer, _), before, now in zip(self._places, self._seen, self._now(), strict=True):
            if before != now:
                raise UsageError(
                    f"stage {stage} changed its buffer {path!r}, of a {type(layer).__name__}: under a bidirectional "
                    "schedule the two copies of a stage see different microbatches, so buffers would drift apart: use "
                    "a layer without running statistics (LayerNorm, GroupNorm, track_running_stats=False), its eval(), "
                    "or a schedule that has each stage once"
                )

    @torch.no_grad()
    def share(self, group: Group) -> None:
        """Copies the buffers of the group's rank 0 to every rank, all of one dtype at once. Raises LinkError."""
        alike: dict[tuple[torch.dtype, torch.device], list[Tensor]] = defaultdict(list)
        for _, layer, name in self._places:
            if (buffer := layer._buffers[name]) is not None and not buffer.is_meta:
                alike[buffer.dtype, buffer.device].append(buffer)
        for each in alike.values():
            row = torch.cat([buffer.flatten() for buffer in each])
            group.broadcast(_bytes_of(row), 0).wait()
            for buffer, part in zip(each, row.split([buffer.numel() for buffer in each]), strict=True):
                buffer.copy_(part.view(buffer.shape))
        self.see()

    def _now(self) -> list[tuple[int, int]]:
        """The identity of each buffer, and how often it was written in place."""
        buffers = [layer._buffers[name] for _, layer, name in self._places]
        return [(id(buffer), getattr(buffer, "_version", 0)) for buffer in buffers]
