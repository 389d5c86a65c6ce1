"""What all ranks say to each other at the end of a step: small tables of numbers, now and then an object. Built on
the transport's sends and receives, so that a rank that does not answer has a name.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import torch
from torch import Tensor

from pipeflow.core.errors import UsageError
from pipeflow.core.rounds import rounds
from pipeflow.parallel.transport.plain import pack, unpack
from pipeflow.parallel.transport.protocol import Tag, Transport
from pipeflow.parallel.transport.work import Exchange, LinkError, Work


def all_gather(transport: Transport, row: Sequence[float]) -> list[list[float]]:
    """Every rank's `row` of float64 numbers, in rank order, the same on every rank; all rows equally long.

    Every rank posts the receives of all rounds at once, so that over a slow link only the first one waits for its
    receiver. No rank returns before every rank has called. Raises LinkError naming the peer that did not answer.
    """
    rank, size = transport.rank, transport.size
    known = torch.empty(size, len(row), dtype=torch.float64, device="cpu")  # of rank, rank + 1, ...
    known[0] = torch.tensor(row, dtype=torch.float64, device="cpu")
    received = [
        start(transport, (rank + distance) % size, Tag.CONTROL, known[distance : distance + count], sending=False)
        for distance, count in rounds(size)
    ]
    sent: list[Work] = []
    for (distance, count), arriving in zip(rounds(size), received, strict=True):
        sent.append(start(transport, (rank - distance) % size, Tag.CONTROL, known[:count], sending=True))
        finish(arriving, _DOING)
    for leaving in sent:
        finish(leaving, _DOING)
    return known.roll(rank, dims=0).tolist()


_DOING = "in the agreement of all ranks"


def all_gather_object(transport: Transport, value: object) -> list[object]:
    """Every rank's `value` (a plain one), in rank order. Raises LinkError like `all_gather`, and
    UsageError for what is no plain value.
    """
    body = torch.frombuffer(bytearray(pack(value)), dtype=torch.uint8)
    sizes = [int(size) for [size] in all_gather(transport, [len(body)])]
    peers = [peer for peer in range(transport.size) if peer != transport.rank]
    arriving = {peer: torch.empty(sizes[peer], dtype=torch.uint8, device="cpu") for peer in peers}
    exchange(transport, Tag.CONTROL, dict.fromkeys(peers, body), arriving, "gathering what every rank measured")
    bodies = {**arriving, transport.rank: body}
    return [unpack(bytes(bodies[rank].tolist())) for rank in range(transport.size)]


@contextmanager
def told_alike(transport: Transport) -> Iterator[None]:
    """Inside, ranks look at what `all_gather` or `all_gather_object` gave all of them: a UsageError that every rank
    finds there is raised on each as it is. Without it, the first one's report could reach another before what that one
    waits for.
    """
    try:
        yield
    except UsageError:
        with suppress(LinkError):  # whoever reports has heard here that all have found it
            all_gather(transport, [0.0])
        raise


def exchange(
    transport: Transport, tag: Tag, outgoing: dict[int, Tensor], incoming: dict[int, Tensor], doing: str
) -> None:
    """Sends a tensor to each peer of `outgoing` and fills those of `incoming` from theirs. Raises LinkError."""
    received = [start(transport, peer, tag, tensor, sending=False) for peer, tensor in incoming.items()]
    sent = [start(transport, peer, tag, tensor, sending=True) for peer, tensor in outgoing.items()]
    for work in (*received, *sent):
        finish(work, doing)


def start(transport: Transport, peer: int, tag: Tag, tensor: Tensor, *, sending: bool) -> Work:
    """Starts one transfer. Raises LinkError when the channel is broken already."""
    move = (transport.sender if sending else transport.receiver)(peer, tag)
    return Exchange(transport.link(peer), move, [tensor])


def finish(work: Work, doing: str) -> None:
    """Waits for one transfer. Raises LinkError that says what this rank was `doing` when it breaks."""
    try:
        work.wait()
    except LinkError as error:
        raise error.during(doing) from None
