"""The loss of a step, and the agreement of all ranks that ends it: the replica's share of the whole batch, the mean
loss, and the check that all ranks did the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pipeflow.core.errors import UsageError
from pipeflow.parallel.context import Context
from pipeflow.parallel.transport.agreement import all_gather, exchange, told_alike
from pipeflow.parallel.transport.protocol import Tag, Transport
from pipeflow.runtime.call import in_words
from pipeflow.runtime.gradients.step_end import Change
from pipeflow.runtime.program.results import Results

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class Told(NamedTuple):
    """One rank's row in the agreement, as float64. Its length is the same for every step, so that ranks that do
    different things still understand each other.
    """

    call: float  # Call.number
    schedule: float  # a digest
    samples: float  # of its batch
    batch: float  # a digest of its content; nan if unknown
    dtype: float = -1.0  # of the loss, as an index; -1 if there is no loss to send
    weight: float = 0.0  # of its replica's batch
    loss: float = 0.0  # its replica's mean
    change: float = 0.0  # of its parameters since the ranks last compared theirs
    gradient_scale: float = 1.0


class Agreed(NamedTuple):
    """The result of the agreement: the loss if it is known here, the largest change of parameters, and the number of
    samples over all replicas.
    """

    loss: Tensor | None
    change: Change
    samples: int


def share_of(results: Results, context: Context) -> float:
    """The factor that makes the average over the replicas an average over samples: this replica's weight in the whole
    batch, as a multiple of an equal share. The ranks that have the last stage exchange their weights.
    """
    if not results.weights:
        return 1.0
    weights = [results.weight]
    if context.data.size > 1:
        mine = torch.tensor(weights, dtype=torch.float64, device=context.device)
        everyones = mine.new_empty(context.data.size)
        context.data.all_gather(everyones, mine).wait()
        weights = everyones.tolist()
    _require_some(weights)
    return results.weight * len(weights) / sum(weights)


def agree(told: Told, results: Results, context: Context, last: Sequence[int], *, everywhere: bool) -> Agreed:
    """Ends a step: no rank goes on before all have reached it.

    The loss is known on the ranks that have the last stage, which are `last` in the pipeline, or on all ranks if
    `everywhere`. Raises UsageError on all ranks if they did different things, or if nothing in the batch counts.
    """
    loss = None
    if results.weights:
        if context.data.size == 1:
            _require_some([results.weight])
        loss = _whole_loss(results, context.transport, last)
    if loss is not None and context.tensor.rank == 0 and (everywhere or context.data.size > 1):
        told = told._replace(dtype=_DTYPES.index(loss.dtype), weight=results.weight, loss=loss.item())
    rows = [Told(*row) for row in all_gather(context.world, told)]
    with told_alike(context.world):
        require_alike(rows, context)
    if loss is None or any(row.dtype >= 0 for row in rows):
        loss = _mean(rows, context) if everywhere or results.weights else None
    samples = sum(row.samples for row in rows[:: len(rows) // context.data.size])
    return Agreed(loss, Change(int(max(row.change for row in rows))), int(samples))


def require_alike(rows: Sequence[Told], context: Context) -> None:
    """Raises UsageError unless all ranks did the same."""
    for rank, row in enumerate(rows):
        if row.call != rows[0].call:
            raise UsageError(
                f"rank {rank} {in_words(row.call)}, but rank 0 {in_words(rows[0].call)}: all ranks must make the same "
                "call"
            )
        if row.schedule != rows[0].schedule:
            raise UsageError(f"rank {rank} was given another schedule than rank 0: pass the same one on every rank")
        if row.gradient_scale != rows[0].gradient_scale:
            raise UsageError(
                f"rank {rank} was given gradient_scale={row.gradient_scale:g}, but rank 0 {rows[0].gradient_scale:g}: "
                "pass the same one on every rank"
            )
    for first in range(0, len(rows), len(rows) // context.data.size):
        replica = rows[first : first + len(rows) // context.data.size]
        if len({row.samples for row in replica}) > 1:
            sizes = ", ".join(str(int(row.samples)) for row in replica)
            raise UsageError(
                f"the ranks read batches of different sizes, {sizes}: all need the same data in the same order"
            )
        digests = {first + rank: row.batch for rank, row in enumerate(replica) if not math.isnan(row.batch)}
        for rank, digest in digests.items():
            if digest != digests[min(digests)]:
                raise UsageError(
                    f"rank {rank} read another batch than rank {min(digests)}: all ranks of a replica need the same "
                    "data in the same order"
                )


def _whole_loss(results: Results, transport: Transport, last: Sequence[int]) -> Tensor | None:
    """The batch's mean loss, summed in microbatch order. If two ranks have the last stage, each for half of the
    microbatches, they exchange their losses.
    """
    if len(last) == 1:
        return results.loss()
    [peer] = [rank for rank in last if rank != transport.rank]
    mine, its = (torch.zeros(1 + results.microbatches, dtype=torch.float64, device="cpu") for _ in range(2))
    for microbatch, part in results.parts().items():
        mine[0], mine[1 + microbatch] = 1 + _DTYPES.index(part.dtype), part
    exchange(transport, Tag.CONTROL, {peer: mine}, {peer: its}, "waiting for the losses of the other last stage")
    dtype = _DTYPES[int(max(mine[0], its[0])) - 1]
    return (mine + its)[1:].to(dtype).sum().to(transport.device)


def _mean(rows: Sequence[Told], context: Context) -> Tensor | None:
    """The mean over the replicas, each counted by its weight; None if no replica has a loss."""
    size = len(rows) // context.data.size
    replicas = [rows[first : first + size] for first in range(0, len(rows), size)]
    told = [row for replica in replicas for row in [each for each in replica if each.dtype >= 0][:1]]
    if not told:
        return None
    weights, losses = (
        [row.weight for row in told],
        [torch.tensor(row.loss, dtype=_DTYPES[int(row.dtype)], device="cpu") for row in told],
    )
    _require_some(weights)
    if len(losses) == 1:
        return losses[0].to(context.device)
    total = torch.stack([loss * weight for loss, weight in zip(losses, weights, strict=True)]).sum()
    return (total / sum(weights)).to(context.device)


def _require_some(weights: Sequence[float]) -> None:
    """Raises UsageError if the weights of all replicas sum to zero."""
    if not sum(weights):
        raise UsageError("the weights of all microbatches sum to zero: no label of this batch counts")
