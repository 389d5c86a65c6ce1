"""Division: which rank writes which part of a checkpoint. A part that several ranks hold is written once, by the rank
that has least to write.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from pipeflow.checkpoint.index import Index, Part, Sizes, Stored, Where, dtype_name, dtype_named
from pipeflow.checkpoint.pieces import Piece, name_of_whole
from pipeflow.checkpoint.storage import RankContent
from pipeflow.core.errors import UsageError


class Offer(NamedTuple):
    """A part of a tensor that a rank could write, or a plain value (without a dtype)."""

    name: str
    bytes: int
    dtype: str | None = None
    shape: Sizes = ()
    offset: Sizes = ()
    sizes: Sizes = ()


def offers_of(content: RankContent) -> list[tuple[Any, ...]]:
    """The Offers of a rank as plain tuples."""
    values = [Offer(name, len(value)) for name, value in content.values.items()]
    pieces = [
        _offer(name, piece) for name, piece in content.pieces.items() if piece.tensor.numel() or not piece.shape.numel()
    ]
    return [tuple(offer) for offer in (*values, *pieces)]


def _offer(name: str, piece: Piece) -> Offer:
    tensor = piece.tensor
    sizes = tuple(piece.shape), tuple(piece.offset), tuple(tensor.shape)
    return Offer(name, tensor.nbytes, dtype_name(tensor.dtype), *sizes)


@dataclass(frozen=True, slots=True)
class Division:
    """The offers that each rank of the world writes; the same on every rank."""

    ranks: tuple[tuple[Offer, ...], ...]

    @classmethod
    def of(cls, everyone: Sequence[Sequence[tuple[Any, ...]]]) -> Division:
        """Divides the offers of all ranks."""
        holders: dict[tuple[str, Sizes], list[int]] = defaultdict(list)
        offers: dict[tuple[str, Sizes], Offer] = {}
        for rank, one in enumerate(everyone):
            for offer in (Offer(*each) for each in one):
                holders[offer.name, offer.offset].append(rank)
                offers.setdefault((offer.name, offer.offset), offer)
        ranks: list[list[Offer]] = [[] for _ in everyone]
        loads = [0] * len(everyone)
        for key in sorted(offers, key=lambda key: (-offers[key].bytes, key)):
            writer = min(holders[key], key=loads.__getitem__)
            ranks[writer].append(offers[key])
            loads[writer] += offers[key].bytes
        return cls(tuple(map(tuple, ranks)))

    def share(self, rank: int, content: RankContent) -> RankContent:
        """The part of its `content` that `rank` writes."""
        names = {offer.name for offer in self.ranks[rank]}
        pieces = {name: piece for name, piece in content.pieces.items() if name in names}
        return RankContent(pieces, {name: value for name, value in content.values.items() if name in names})

    def index(self, places: Sequence[Mapping[str, Where]]) -> Index:
        """The index of the checkpoint, from the `places` that each rank wrote to. Raises UsageError if the parts of a
        tensor do not make up the whole.
        """
        found: dict[str, list[tuple[Offer, Part]]] = defaultdict(list)
        values: dict[str, Where] = {}
        for one, written in zip(self.ranks, places, strict=True):
            for offer in one:
                if offer.dtype is None:
                    values[offer.name] = written[offer.name]
                else:
                    found[name_of_whole(offer.name)].append(
                        (offer, Part(offer.offset, offer.sizes, written[offer.name]))
                    )
        return Index({name: _stored(name, parts) for name, parts in found.items()}, values)

    def require_whole(self) -> None:
        """Raises UsageError if the parts of a tensor do not make up the whole."""
        self.index([{offer.name: Where("", 0, 0) for offer in one} for one in self.ranks])


def _stored(name: str, parts: Sequence[tuple[Offer, Part]]) -> Stored:
    offers = [offer for offer, _ in parts]
    if len({(offer.dtype, offer.shape) for offer in offers}) > 1:
        raise UsageError(f"{name!r} is {offers[0].dtype} {offers[0].shape} on one rank, but differs on another")
    try:
        return Stored(dtype_named(offers[0].dtype), offers[0].shape, tuple(part for _, part in parts))
    except ValueError as error:
        raise UsageError(f"the ranks' parts of {name!r} do not make up the whole: {error}") from error
