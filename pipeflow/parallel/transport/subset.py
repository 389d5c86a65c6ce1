"""Subset: some ranks of a transport as a transport of their own, for example one of several pipelines."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from pipeflow.core.errors import Failure
from pipeflow.parallel.transport.group import Group
from pipeflow.parallel.transport.protocol import Channel, Start, Tag, Transport
from pipeflow.parallel.transport.work import Connection, LinkError


class Subset:
    """The `ranks` of transport `whole`, counted from 0 in the order given; this rank must be one of them.

    A failure concerns the whole transport: all of its ranks are told, and all of its channels are closed.
    """

    def __init__(self, whole: Transport, ranks: Sequence[int]) -> None:
        self.rank = ranks.index(whole.rank)
        self.size = len(ranks)
        self.device: torch.device = whole.device
        self.timeout = whole.timeout
        self._whole = whole
        self._ranks = tuple(ranks)

    def world_rank(self, peer: int) -> int:
        return self._whole.world_rank(self._ranks[peer])

    def connect(self, channels: Iterable[Channel]) -> None:
        self._whole.connect(
            Channel(self._ranks[source], self._ranks[destination], tag) for source, destination, tag in channels
        )

    def sender(self, peer: int, tag: Tag) -> Start:
        return self._whole.sender(self._ranks[peer], tag)

    def receiver(self, peer: int, tag: Tag) -> Start:
        return self._whole.receiver(self._ranks[peer], tag)

    def link(self, peer: int) -> Connection:
        return self._whole.link(self._ranks[peer])

    def group(self, ranks: Sequence[int]) -> Group:
        return self._whole.group([self._ranks[rank] for rank in ranks])

    @property
    def patience(self) -> float | None:
        return self._whole.patience

    @patience.setter
    def patience(self, seconds: float | None) -> None:
        self._whole.patience = seconds

    @property
    def call(self) -> object:
        return self._whole.call

    @call.setter
    def call(self, asked: object) -> None:
        self._whole.call = asked

    def report(self, failure: Failure | LinkError) -> Failure:
        return self._whole.report(failure)

    def enter(self, number: int) -> None:
        self._whole.enter(number)

    def reopen(self) -> None:
        self._whole.reopen()

    def close(self) -> None:
        """Does nothing: the channels belong to the whole transport."""
