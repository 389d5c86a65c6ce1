"""Values: gives a tensor that several ranks hold the same values on all of them. Values are sent as bytes, whatever the
dtype.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn

from pipeflow.parallel.sharding import local_part
from pipeflow.parallel.transport.agreement import exchange
from pipeflow.parallel.transport.group import Group
from pipeflow.parallel.transport.protocol import Tag, Transport


def named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The parameters and buffers of `module`, by name."""
    yield from module.named_parameters()
    yield from module.named_buffers()


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


@torch.no_grad()
def share_packed(tensors: Iterable[Tensor], group: Group) -> None:
    """Copies the tensors of the group's rank 0 to every rank, all of one dtype at once. Raises LinkError."""
    alike: dict[tuple[torch.dtype, torch.device], list[Tensor]] = defaultdict(list)
    for tensor in tensors:
        if not tensor.is_meta:
            alike[tensor.dtype, tensor.device].append(tensor)
    for each in alike.values():
        row = torch.cat([tensor.flatten() for tensor in each])
        group.broadcast(_bytes_of(row), 0).wait()
        for tensor, part in zip(each, row.split([tensor.numel() for tensor in each]), strict=True):
            tensor.copy_(part.view(tensor.shape))


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
