"""The process groups of torch's own, with which libraries and users compute: closes them, and compares how far the
ranks have come in them. Looked at only after a failure. Must not contain: the groups of pipeflow's channels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch.distributed as dist

from pipeflow.engine.parallel.transport import nccl
from pipeflow.engine.parallel.transport.channels import expire_each
from pipeflow.engine.torch_private.distributed import group_names


class Begun(NamedTuple):
    """How many collectives a process has begun in each of its groups.

    Attributes:
        rank: of the process, in torch's world.
        groups: by name, the ranks of the group in torch's world, and the number of collectives.
    """

    rank: int
    groups: dict[str, tuple[tuple[int, ...], int]]


def begun() -> Begun:
    """The collectives that this process has begun. A group whose backend does not count them is left out."""
    if not dist.is_initialized():
        return Begun(-1, {})
    found, names = {}, group_names()
    for group, backend in _backends():
        with suppress(RuntimeError):
            number = backend._get_sequence_number_for_group()
            found[f"{names[group]}/{backend.name()}"] = (tuple(dist.get_process_group_ranks(group)), number)
    return Begun(dist.get_rank(), found)


def unlike(everyone: Sequence[Begun]) -> str:
    """Names two processes that have begun other numbers of collectives in a group; empty if there are none."""
    numbers = {(each.rank, name): entry for each in everyone for name, entry in each.groups.items()}
    for (rank, name), (members, number) in numbers.items():
        for other in members:
            theirs = numbers.get((other, name), (members, number))
            if theirs != (members, number) and theirs[0] == members:
                return f"rank {rank} has begun {number} collectives, rank {other} {theirs[1]} (ranks {list(members)})"
    return ""


def close_all() -> None:
    """Closes every group of this process. Whoever waits for a collective gets an error, here and at the other ends."""
    backends = [backend for _, backend in _backends()]
    nccl.abort([backend for backend in backends if backend.name() != "gloo"])
    expire_each([backend for backend in backends if backend.name() == "gloo"])


def _backends() -> Iterator[tuple[Any, Any]]:
    """Each group of this process, with each of its backends."""
    for group in group_names():
        if isinstance(group, dist.ProcessGroup):  # not the marker of a group to which this process does not belong
            backends = [_backend(group, device) for device in group._device_types]
            yield from ((group, backend) for backend in {id(each): each for each in backends if each}.values())


def _backend(group: Any, device: Any) -> Any:
    with suppress(RuntimeError):  # none for this device
        return group._get_backend(device)
    return None
