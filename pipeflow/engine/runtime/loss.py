"""The loss of a step, and the agreement of all ranks at its end. They agree on each replica's share of the whole batch
and on the mean loss, and check that all ranks did the same (`StepCall`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipeflow.core.errors import UsageError
from pipeflow.core.schedule import Schedule
from pipeflow.engine.parallel.context import Context
from pipeflow.engine.parallel.layout import WorldLayout
from pipeflow.engine.parallel.transport.agreement import all_gather, all_gather_tensor, exchange, told_alike
from pipeflow.engine.parallel.transport.protocol import Tag, Transport
from pipeflow.engine.runtime.gradients.step_end import ParameterChange
from pipeflow.engine.runtime.program.results import Results
from pipeflow.engine.runtime.weighing import require_some

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class AgreementRow(NamedTuple):
    """One rank's row in the agreement, as float64. Its length is the same for every step, so that ranks that do
    different things still understand each other.
    """

    call: float  # Call.number
    schedule: float  # a digest
    samples: float  # of its batch
    batch: float  # a digest of its content; nan if unknown
    dtype: float = -1.0  # of the loss, as an index; -1 if there is no loss to send; all tensor ranks send the same
    weight: float = 0.0  # of its replica's batch
    loss: float = 0.0  # its replica's mean
    change: float = 0.0  # of its parameters since the ranks last compared theirs
    gradient_scale: float = 1.0
    buffers: float = 0.0  # 1 if this rank's buffers have changed since the replicas last shared theirs
    counted: float = 0.0  # norm of its gradients that it counts, if the step steps the optimizer
    elsewhere: float = 0.0  # norm of those that another rank counts
    seconds: float = 0.0  # time of its step without the agreement


class Agreed(NamedTuple):
    """The result of the agreement: the loss, the largest change of parameters, the number of samples over all replicas
    and their weight, whether buffers have changed on any rank, and what every rank told. Loss and weight are known on
    some ranks only.
    """

    loss: Tensor | None
    change: ParameterChange
    samples: int
    weight: float
    buffers: bool = False
    rows: Sequence[AgreementRow] = ()


def prepare(
    told: AgreementRow, results: Results, context: Context, last: Sequence[int], *, microbatches: int, everywhere: bool
) -> tuple[AgreementRow, Callable[[Sequence[AgreementRow]], Agreed]]:
    """What this rank tells the others at the end of a step, and what follows from the rows of all ranks.

    The loss is known on the ranks that have the last stage, which are `last` in the pipeline, or on all ranks if
    `everywhere`. `microbatches` is their number in the schedule. On a CPU the loss is part of the agreement. Another
    device may still be computing it: the host waits for the other hosts only, and the loss follows from device to
    device; unless the world is elastic, since a rank may die on the way.

    Raises UsageError if nothing in the batch counts.
    """
    on_host, layout = is_host(context.device) or context.elastic, context.layout
    passes_on = everywhere or context.losses.size > 1 or (len(last) > 1 and not on_host)
    loss = None
    if results.weights.parts and context.losses.size == 1:
        require_some([results.weights.whole])
    if on_host and (
        results.weights.parts or results.settle
    ):  # to settle waits for an output, which an empty path lacks
        loss = _whole_loss(results, context.transport, last)
    elif results.weights.parts:
        loss = results.loss()
    if loss is not None and passes_on:
        value = loss.item() if on_host else math.nan
        told = told._replace(dtype=_DTYPES.index(loss.dtype), weight=results.weights.whole, loss=value)
    own, weight, is_known = loss, results.weights.whole, everywhere or bool(results.weights.parts) or loss is not None

    def conclude(rows: Sequence[AgreementRow]) -> Agreed:
        found = own, weight
        if any(row.dtype >= 0 for row in rows):
            losses = _told_losses(rows) if on_host else _sent_losses(rows, results, context, microbatches)
            found = _mean(rows, losses, layout, context.device) if is_known else (None, 0.0)
        samples = sum(row.samples for row in rows[:: len(rows) // layout.data])
        change, buffers = max(row.change for row in rows), any(row.buffers for row in rows)
        return Agreed(found[0], ParameterChange(int(change)), int(samples), found[1], buffers, rows)

    return told, conclude


def agree(told: AgreementRow, conclude: Callable[[Sequence[AgreementRow]], Agreed], context: Context) -> Agreed:
    """Ends a step: no rank goes on before all have reached it. Raises UsageError on all ranks if they did different
    things.
    """
    rows = [AgreementRow(*row) for row in all_gather(context.world, told)]
    with told_alike(context.world):
        require_alike(rows, context)
    return conclude(rows)


def told_alone(told: AgreementRow, results: Results) -> Agreed:
    """The end of a step as this rank knows it without the others: with the loss on the rank that has the last stage.
    Raises UsageError if nothing in the batch counts.
    """
    if results.weights.parts:
        require_some([results.weights.whole])
    return Agreed(results.loss(), ParameterChange.NONE, int(told.samples), results.weights.whole)


def is_host(device: torch.device) -> bool:
    """True if the host computes the loss itself, so that it has its value at once."""
    return device.type == "cpu"


def require_alike(rows: Sequence[AgreementRow], context: Context) -> None:
    """Raises UsageError unless all ranks did the same, and if nothing in the batch counts."""
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
    layout = context.layout
    for first in range(0, len(rows), len(rows) // layout.data):
        replica = [rows[rank] for rank in layout.replica_ranks(first)]
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
                    "data in the same order; if the script splits or shuffles data, seed its random numbers first"
                )
    for ranks in _models(context.layout):
        _require_one_loss([(rank, rows[rank]) for rank in ranks if rows[rank].dtype >= 0])
    if weights := [row.weight for row in rows if row.dtype >= 0]:
        require_some(weights)


def _require_one_loss(rows: Sequence[tuple[int, AgreementRow]]) -> None:
    """Raises UsageError if the loss of a replica, with the ranks that have it, differs by more than rounding."""
    for rank, row in rows[1:]:
        lowest, first = rows[0]
        rounding = torch.finfo(_DTYPES[int(row.dtype)]).eps
        both_nan = math.isnan(row.loss) and math.isnan(first.loss)
        if not both_nan and not math.isclose(row.loss, first.loss, rel_tol=rounding**0.5, abs_tol=rounding):
            raise UsageError(
                f"the loss of one batch is {row.loss:.9g} on rank {rank}, {first.loss:.9g} on rank {lowest}: either a "
                "layer was split that must stay whole (add a Rule of kind 'whole' for it), or the tensor ranks have "
                "different values, such as a dropout mask with another seed"
            )


def _whole_loss(results: Results, transport: Transport, last: Sequence[int]) -> Tensor | None:
    """The batch's mean loss, summed in microbatch order. If several ranks have the last stage, each for a part of the
    microbatches, they exchange their losses; one that computed none learns the batch's weight, too.
    """
    if len(last) == 1:
        return results.loss()
    rows = {rank: torch.zeros(2 + results.microbatches, dtype=torch.float64, device="cpu") for rank in last}
    mine = rows[transport.rank]
    mine[1] = results.weights.whole
    for microbatch, part in results.parts().items():
        mine[0], mine[2 + microbatch] = 1 + _DTYPES.index(part.dtype), part
    others = {rank: row for rank, row in rows.items() if rank != transport.rank}
    waiting = "waiting for the losses of the other last stage"
    exchange(transport, Tag.CONTROL, dict.fromkeys(others, mine), others, waiting)
    dtype = _DTYPES[int(max(row[0] for row in rows.values())) - 1]
    if not results.weights.parts:
        results.weights = results.weights._replace(whole=max(float(row[1]) for row in rows.values()))
    return torch.stack([*rows.values()]).sum(dim=0)[2:].to(dtype).sum().to(transport.device)


def _told_losses(rows: Sequence[AgreementRow]) -> dict[int, Tensor]:
    """The loss of its replica that each rank told, by rank."""
    return {
        rank: torch.tensor(row.loss, dtype=_DTYPES[int(row.dtype)], device="cpu")
        for rank, row in enumerate(rows)
        if row.dtype >= 0
    }


def _sent_losses(
    rows: Sequence[AgreementRow], results: Results, context: Context, microbatches: int
) -> dict[int, Tensor]:
    """The loss of each copy of the model, on this device, by the copy's first rank that has a part of it. All ranks
    call it together; it is summed in microbatch order, also if two ranks have the last stage.
    """
    mine = torch.zeros(microbatches, dtype=torch.float64, device=context.device)
    for microbatch, part in results.parts().items():
        mine[microbatch] = part
    everyones = all_gather_tensor(context.world, mine)
    losses = {}
    for ranks in _models(context.layout):
        first = context.layout.place(ranks[0]).tensor
        tellers = [rank for rank in ranks if rows[rank].dtype >= 0 and context.layout.place(rank).tensor == first]
        if tellers:
            parts = torch.stack([everyones[rank] for rank in tellers]).sum(dim=0)  # each part stands in one row
            losses[tellers[0]] = parts.to(_DTYPES[int(rows[tellers[0]].dtype)]).sum()
    return losses


@cache
def _models(layout: WorldLayout) -> list[tuple[int, ...]]:
    """The world ranks of each copy of the model, which compute one loss: one copy per context rank of each replica. The
    ranks of a grid compute one for each part of the samples.
    """
    return list(dict.fromkeys(layout.model_ranks(rank) for rank in range(layout.world_size)))


def _mean(
    rows: Sequence[AgreementRow], losses: Mapping[int, Tensor], layout: WorldLayout, device: torch.device
) -> tuple[Tensor, float]:
    """The mean of the `losses` by rank, each counted by its weight, and their weight. A copy of the model counts once:
    it has the loss of its replica's batch, or of the tokens or samples that a part of the replica's ranks have.
    """
    tellers = [rank for ranks in _models(layout) for rank in [each for each in ranks if each in losses][:1]]
    weights = [rows[rank].weight for rank in tellers]
    if len(tellers) == 1:
        return losses[tellers[0]].to(device), weights[0]
    total = torch.stack([losses[rank] * weight for rank, weight in zip(tellers, weights, strict=True)]).sum()
    return (total / sum(weights)).to(device), sum(weights)


class StepCall(NamedTuple):
    """The arguments of `execute_pipeline`, which must be the same on all ranks, and the size of the batch, if known."""

    training: bool
    reduce: bool
    return_outputs: bool | Callable[[Any], object]
    broadcast_loss: bool
    trace: bool
    schedule: Schedule
    gradient_scale: float = 1.0
    batch: tuple[int, int] | None = None  # number of the replica, and samples of its batch
    adapts: bool = False  # whether the order of later steps may follow from the time of this one

    @property
    def number(self) -> float:
        """A number that encodes the flags, but not the schedule and the scale."""
        return float(sum(int(bool(asked)) << position for position, asked in enumerate(self[:_FLAGS])))

    def __str__(self) -> str:
        return f"{in_words(self.number)} with {self.schedule.name!r}, {self.schedule.num_microbatches} microbatches"


def in_words(number: float) -> str:
    """Describes in words the call that has this number."""
    training, *asked = (bool(int(number) >> position & 1) for position in range(_FLAGS))
    names = StepCall._fields[1:_FLAGS]
    others = [f"{name}={value}" for name, value in zip(names, asked, strict=True) if value != _USUAL[name]]
    return ", ".join(["trains" if training else "evaluates", *others])


_FLAGS = StepCall._fields.index("schedule")
_USUAL = {"reduce": True, "return_outputs": False, "broadcast_loss": False, "trace": False}
