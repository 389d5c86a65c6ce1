"""Agreements: small tables of numbers, and sometimes an object, that all ranks exchange at the end of a step; and trees
of tensors and plain values that one rank tells to others, which do not know their structure beforehand. Built on the
transport's sends and receives, so that an error names the rank that does not answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipeflow.core.agreement_rounds import rounds
from pipeflow.core.errors import UsageError
from pipeflow.engine.parallel.transport.plain import pack, unpack
from pipeflow.engine.parallel.transport.protocol import Exchange, Group, LinkError, Tag, Transport, Work, saying
from pipeflow.engine.torch_private.trees import tree_flatten, tree_map, tree_unflatten


def all_gather(transport: Transport, row: Sequence[float]) -> list[list[float]]:
    """Gathers a `row` of float64 numbers from every rank, in rank order. All rows must have the same length.

    Every rank posts the receives of all rounds at once, so that over a slow link only the first round waits for its
    receiver. No rank returns before all have called. Raises LinkError naming the peer that did not answer.
    """
    mine = torch.tensor(row, dtype=torch.float64, device="cpu")
    known = _in_rounds(transport, mine, [len(row)] * transport.size, "in the agreement of all ranks")
    return known.view(transport.size, len(row)).roll(transport.rank, dims=0).tolist()


def _in_rounds(transport: Transport, mine: Tensor, sizes: Sequence[int], doing: str) -> Tensor:
    """Every rank's numbers, of this rank first, then of the ranks after it; `sizes` says how many, in this order."""
    rank, size, begins = transport.rank, transport.size, [0, *accumulate(sizes)]
    known = mine.new_empty(begins[-1])
    known[: begins[1]] = mine
    received = [
        start(transport, (rank + first) % size, Tag.CONTROL, known[begins[first] : begins[first + many]], sending=False)
        for first, many in rounds(size)
    ]
    sent: list[Work] = []
    for (distance, count), arriving in zip(rounds(size), received, strict=True):
        sent.append(start(transport, (rank - distance) % size, Tag.CONTROL, known[: begins[count]], sending=True))
        finish(arriving, doing)
    for leaving in sent:
        finish(leaving, doing)
    return known


def connect_devices(transport: Transport) -> None:
    """Connects what `all_gather_tensor` needs, before a step. All ranks call it together. Raises LinkError."""
    if transport.device.type != "cpu":
        transport.group(range(transport.size)).connect()


def all_gather_tensor(transport: Transport, row: Tensor) -> Tensor:
    """Gathers numbers that a device computed, a `row` of one dimension, from every rank: [numbers] becomes [ranks,
    numbers], on the device of `row`.

    On a CPU this is `all_gather`, in float64. On another device it is a collective, for which the host does not wait.
    Raises LinkError.
    """
    if row.device.type == "cpu":
        return torch.tensor(all_gather(transport, row.tolist()), dtype=torch.float64, device="cpu")
    everyones = row.new_empty(transport.size * len(row))
    transport.group(range(transport.size)).all_gather(everyones, row).wait()
    return everyones.view(transport.size, len(row))


def gather_rows(group: Group, tensor: Tensor) -> list[Tensor]:
    """The tensors of all ranks of a group, in rank order, on its device. Their shapes may differ in dim 0. All ranks of
    the group call it together.
    """
    if not tensor.dim():
        return [row[0] for row in gather_rows(group, tensor[None])]
    lengths = torch.empty(group.size, dtype=torch.int64, device=tensor.device)
    group.all_gather(lengths, torch.tensor([len(tensor)], device=tensor.device)).wait()
    counts: list[int] = lengths.tolist()
    padded = tensor.new_zeros(max(counts), *tensor.shape[1:])
    padded[: len(tensor)] = tensor
    rows = padded.new_empty(group.size * len(padded), *tensor.shape[1:])
    group.all_gather(rows, padded).wait()
    return [part[:count] for part, count in zip(rows.view(group.size, *padded.shape), counts, strict=True)]


def all_gather_object(transport: Transport, value: object) -> list[object]:
    """Gathers a plain value from every rank, in rank order.

    Raises LinkError like `all_gather`, and UsageError if `value` is not a plain value (see `plain.pack`).
    """
    body = torch.frombuffer(bytearray(pack(value)), dtype=torch.uint8)
    rank, sizes = transport.rank, [int(size) for [size] in all_gather(transport, [len(body)])]
    sizes = [*sizes[rank:], *sizes[:rank]]
    bodies = _in_rounds(transport, body, sizes, "gathering what every rank measured").split(sizes)
    return [unpack(bodies[other - rank].numpy().tobytes()) for other in range(transport.size)]


@contextmanager
def told_alike(transport: Transport) -> Iterator[None]:
    """Context manager for code that checks results of `all_gather` or `all_gather_object`: a UsageError that every rank
    finds is raised on each rank as it is.

    Without it, the report of the first rank could reach another rank that still waits for data of the first.
    """
    try:
        yield
    except UsageError:
        with suppress(LinkError):  # a rank reports only after all have found the error
            all_gather(transport, [0.0])
        raise


def exchange(
    transport: Transport, tag: Tag, outgoing: dict[int, Tensor], incoming: dict[int, Tensor], doing: str
) -> None:
    """Sends `outgoing[peer]` to each peer and receives into `incoming[peer]`. Raises LinkError."""
    received = [start(transport, peer, tag, tensor, sending=False) for peer, tensor in incoming.items()]
    sent = [start(transport, peer, tag, tensor, sending=True) for peer, tensor in outgoing.items()]
    for work in (*received, *sent):
        finish(work, doing)


def start(transport: Transport, peer: int, tag: Tag, tensor: Tensor, *, sending: bool) -> Work:
    """Starts one transfer. Raises LinkError if the channel is already broken."""
    move = (transport.sender if sending else transport.receiver)(peer, tag)
    return Exchange(transport.link(peer), move, [tensor])


def finish(work: Work, doing: str) -> None:
    """Waits for one transfer. If it breaks, raises a LinkError that says what this rank was `doing`."""
    with saying(doing):
        work.wait()


_HEARING = "waiting for values from another rank"


class TensorPlace(NamedTuple):
    """The place of a tensor in the tree."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def tell(transport: Transport, peers: Sequence[int], tree: object) -> None:
    """Sends `tree` to each of `peers`, which must call `hear`. Raises LinkError, and UsageError if a leaf is neither a
    tensor nor a plain value.
    """
    leaves, spec = tree_flatten(tree)
    tensors = [leaf.detach().cpu().contiguous() for leaf in leaves if isinstance(leaf, Tensor)]
    marked = [TensorPlace(tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    body = torch.frombuffer(bytearray(pack(tree_unflatten(marked, spec))), dtype=torch.uint8)
    parts = [torch.tensor([len(body)], device="cpu"), body, *(tensor for tensor in tensors if tensor.numel())]
    works = [start(transport, peer, Tag.CONTROL, part, sending=True) for peer in peers for part in parts]
    for work in works:
        finish(work, "sending values to other ranks")


def hear(transport: Transport, peer: int) -> Any:
    """Receives a tree from `peer`; its tensors are in CPU memory. Raises LinkError."""
    length = torch.empty(1, dtype=torch.int64, device="cpu")
    finish(start(transport, peer, Tag.CONTROL, length, sending=False), _HEARING)
    body = torch.empty(int(length), dtype=torch.uint8, device="cpu")
    finish(start(transport, peer, Tag.CONTROL, body, sending=False), _HEARING)

    def made(leaf: object) -> object:
        if not isinstance(leaf, TensorPlace):
            return leaf
        tensor = torch.empty(leaf.shape, dtype=leaf.dtype, device="cpu")
        if tensor.numel():
            finish(start(transport, peer, Tag.CONTROL, tensor, sending=False), _HEARING)
        return tensor

    return tree_map(made, unpack(body.numpy().tobytes()), is_leaf=lambda each: isinstance(each, TensorPlace))
