"""Links: the times of collectives and transfers, through the groups and channels that training uses. Must not
contain: times of computations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import nn

from pipeflow.engine.parallel.transport.agreement import finish, start
from pipeflow.engine.parallel.transport.protocol import Channel, Group, Tag
from pipeflow.engine.runtime.gradients.sums import GroupSum
from pipeflow.engine.runtime.gradients.weights import in_buckets
from pipeflow.planning import rates
from pipeflow.tools.calibration.machine import Stopwatch, Work, runs_ahead
from pipeflow.tools.calibration.machine_times import SizeTime, SumTime

SUMS = (2**12, 2**16, 2**18, 2**20, 2**22, 2**24, 2**26)  # bytes of an activation
GRADIENTS = (2**20, 2**23, 2**25)  # bytes of a stage's gradients
PARAMETER = 2**20  # bytes of each parameter among them
TRANSFERS = (2**10, 2**14, 2**17, 2**20, 2**22, 2**24, 2**26)  # bytes of an activation
COPIES = (2**20, 2**22, 2**24, 2**26)  # bytes that are offloaded
BESIDE = 512  # dimensions of a product before each sum on a CPU
FEWEST = 4  # sizes, for a line through their times


def sums(watch: Stopwatch, per_node: int, budget: float, sizes: Sequence[int] = SUMS) -> Iterator[SumTime]:
    """Yields times in which groups of 2, 4, ... ranks of a node sum tensors of `sizes` bytes, until they are too long
    to be measured in `budget` seconds. With several nodes, all ranks together are a group, too. All groups of a size
    sum at the same time. On a CPU, ranks compute before each sum, because the threads that sum then wait for a core,
    and ranks for each other. The time is what the sum adds to the computation, but at least the time of the sum alone.
    """
    whole = watch.context.world_size
    each_group = [*_powers(per_node), *[whole] * (whole > per_node)]
    each = budget / (len(each_group) * len(sizes))
    before = None if runs_ahead(watch.context.device) else _product()
    alone = 0.0 if before is None else watch.seconds(before, each)
    for ranks in each_group:
        group = watch.context.world.group(_block(watch.context.rank, ranks))
        shape = rates.RankGroup(ranks, min(ranks, per_node))
        for count, seconds in _growing(watch, sizes, each, partial(_sum_work, watch, group, before)):
            if before is not None:
                by_itself = watch.seconds(_sum_work(watch, group, None, int(count)), each / 2)
                seconds = max(seconds - alone, by_itself)
            yield SumTime(shape, count, seconds)


def gradient_sums(
    watch: Stopwatch, per_node: int, budget: float, sizes: Sequence[int] = GRADIENTS
) -> Iterator[SumTime]:
    """Yields times in which gradients of `sizes` bytes are averaged as a step does it, in groups of 2, 4, ... ranks of
    a node and, if there are several nodes, in groups of one rank of each.
    """
    context = watch.context
    across = tuple(range(context.rank % per_node, context.world_size, per_node))
    groups = [(_block(context.rank, ranks), ranks) for ranks in _powers(per_node)]
    groups += [(across, 1)] * (len(across) > 1)
    each = budget / (len(groups) * len(sizes))
    for ranks, in_node in groups:
        group = watch.context.world.group(ranks)
        for count, seconds in _growing(watch, sizes, each, partial(_gradient_work, watch, group)):
            yield SumTime(rates.RankGroup(len(ranks), in_node), count, seconds)


def sync_seconds(watch: Stopwatch, per_node: int, budget: float) -> float:
    """Seconds in which the host launches a collective of a node's ranks, per other rank."""
    group = watch.context.world.group(_block(watch.context.rank, per_node))
    return watch.seconds(_sum_work(watch, group, None, SUMS[0]), budget, launch=True) / (per_node - 1)


def transfers(
    watch: Stopwatch, per_node: int, budget: float, sizes: Sequence[int] = TRANSFERS
) -> tuple[list[SizeTime], list[SizeTime]]:
    """Times in which activations of `sizes` bytes reach a neighbour in the node, and those to one in another node if
    there are several. All pairs transfer at the same time, in both directions; the time is half of a round trip.
    """
    rank, nodes = watch.context.rank, watch.context.world_size // per_node
    node, local = divmod(rank, per_node)
    each = budget / (len(sizes) * (1 + (nodes > 1)))

    def times(peer: int | None) -> list[SizeTime]:
        found = _growing(watch, sizes, each, partial(_transfer_work, watch, peer))
        return [SizeTime(count, seconds / 2) for count, seconds in found]

    near = times(None if local == per_node - 1 and per_node % 2 else rank - local + (local ^ 1))
    far = None if node == nodes - 1 and nodes % 2 else (node ^ 1) * per_node + local
    return near, times(far) if nodes > 1 else []


def host_copies(watch: Stopwatch, budget: float, sizes: Sequence[int] = COPIES) -> Iterator[SizeTime]:
    """Yields times in which `sizes` bytes are copied to the memory of the host: on a GPU to pinned memory, as a step
    copies what it offloads. All ranks copy at the same time.
    """
    return _growing(watch, sizes, budget / len(sizes), partial(_copy_work, watch))


def _growing(watch: Stopwatch, sizes: Sequence[int], each: float, work: Callable[[int], Work]) -> Iterator[SizeTime]:
    """Yields sizes in bytes and the seconds of their work: FEWEST of them, and more until one call takes a large part
    of `each` seconds.
    """
    for index, size in enumerate(sizes):
        seconds = watch.seconds(work(size), each)
        yield SizeTime(size, seconds)
        if index + 1 >= FEWEST and seconds > each / FEWEST:
            return


def _product() -> Work:
    """A product that takes about as long as a part of a layer between two sums."""
    return partial(torch.mm, torch.rand(BESIDE, BESIDE), torch.rand(BESIDE, BESIDE))


def _sum_work(watch: Stopwatch, group: Group, before: Work | None, count: int) -> Work:
    tensor = torch.zeros(count // 4, device=watch.context.device)

    def work() -> None:
        if before is not None:
            before()
        group.all_reduce(tensor).wait()

    return work


def _gradient_work(watch: Stopwatch, group: Group, count: int) -> Work:
    each = min(PARAMETER, count) // 4
    parameters = [nn.Parameter(torch.zeros(each, device=watch.context.device)) for _ in range(count // 4 // each)]
    gradients = [torch.zeros_like(parameter) for parameter in parameters]
    reductions = [GroupSum(bucket, group, None, None, mean=True) for bucket in in_buckets(parameters)]

    def work() -> None:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient  # from where it moves into its bucket, as in a step
        for each in reductions:
            each.start()
        for each in reductions:
            each.finish()

    return work


def _copy_work(watch: Stopwatch, count: int) -> Work:
    device = watch.context.device
    held = torch.zeros(count, dtype=torch.uint8, device=device)
    host = torch.zeros(count, dtype=torch.uint8, pin_memory=device.type == "cuda")
    return lambda: host.copy_(held, non_blocking=True)


def _transfer_work(watch: Stopwatch, peer: int | None, count: int) -> Work:
    """A transfer there and back. A rank without a peer only waits for the others."""
    world, device, rank = watch.context.world, watch.context.device, watch.context.rank
    if peer is None:
        return lambda: None
    sent = torch.zeros(count // 4, device=device)
    low, high = sorted((rank, peer))
    world.connect([Channel(low, high, Tag.ACTIVATION), Channel(high, low, Tag.GRADIENT)])

    def work() -> None:
        for tag, sending in ((Tag.ACTIVATION, rank < peer), (Tag.GRADIENT, rank > peer)):
            tensor = sent if sending else torch.empty_like(sent)
            finish(start(world, peer, tag, tensor, sending=sending), "measuring a transfer")

    return work


def _block(rank: int, ranks: int) -> tuple[int, ...]:
    """The neighbours of `rank`, in groups of `ranks`."""
    first = rank // ranks * ranks
    return tuple(range(first, first + ranks))


def _powers(per_node: int) -> list[int]:
    """The sizes of groups into which a node's ranks divide: 2, 4, ..., and all of them."""
    return [*(size for size in (2, 4, 8) if size < per_node and not per_node % size), *[per_node] * (per_node > 1)]
