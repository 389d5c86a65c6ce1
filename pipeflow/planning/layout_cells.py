"""Cells: layouts without schedule and cut, each at one level of saving memory, which is called its rung. Must not
contain: what they cost.

To recompute more, or to divide more among replicas (ZeRO-2, ZeRO-3), costs time and saves bytes. So a search begins
with the lightest rung of each cell, and climbs to a heavier one only where a layout does not fit. This loses nothing
where the same layout on a heavier rung is not faster. With ZeRO-3 on several pipeline ranks it may be, by some percent
in short steps, if gathers hide that ZeRO-1 does at the end of a step. So there it is no rung but a size: it is tried
from the beginning. A new dimension is a loop in `_sizes_of`, or another rung.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

from pipeflow.core.errors import UsageError
from pipeflow.planning.engines import engine_named
from pipeflow.planning.layout import Wanted
from pipeflow.planning.mesh_sizes import Sizes, divisors, meshes, microbatch_sizes, takes
from pipeflow.planning.setup import Setup


class Cell(NamedTuple):
    """All of a layout but its schedule and its cut."""

    setup: Setup
    pipeline: int
    microbatches: int

    @property
    def rung(self) -> tuple[Any, int]:
        """How it saves memory: its recomputation and its ZeRO stage."""
        return self.setup.checkpoint, self.setup.zero

    def on(self, wanted: Wanted, rung: tuple[Any, int]) -> Cell:
        """The same sizes on another rung."""
        checkpoint, zero = rung
        shards = wanted.shard_ranks if zero else None
        return self._replace(setup=replace(self.setup, checkpoint=checkpoint, zero=zero, shard_ranks=shards))


def cells(wanted: Wanted) -> Iterator[Cell]:
    """All combinations of sizes, microbatches and rungs that `wanted` allows."""
    for cell in _sizes_of(wanted):
        yield from (cell.on(wanted, rung) for rung in product(wanted.checkpoints, _zeros(wanted, cell)))


def lightest_cells(wanted: Wanted) -> Iterator[Cell]:
    """The cells on their lightest rung. With kinds that save memory in orders, a layout that fits may be slower than
    one that recomputes all, so all checkpoints are among them.
    """
    checkpoints = wanted.checkpoints if wanted.kinds != "none" else wanted.checkpoints[:1]
    for cell in _sizes_of(wanted):
        zeros = _zeros(wanted, cell)
        begun = zeros[:1] if cell.pipeline == 1 else zeros
        yield from (cell.on(wanted, rung) for rung in product(checkpoints, begun))


def leanest_cells(wanted: Wanted) -> Iterator[Cell]:
    """The cells that keep the fewest activations: in the smallest microbatches, with the most recomputation."""
    for cell in _sizes_of(wanted, smallest=True):
        yield from (cell.on(wanted, (wanted.checkpoints[-1], zero)) for zero in _zeros(wanted, cell))


def heavier(wanted: Wanted, cell: Cell) -> Iterator[Cell]:
    """The cells one rung above."""
    order, (checkpoint, zero) = wanted.checkpoints, cell.rung
    if wanted.kinds == "none" and checkpoint != order[-1]:
        yield cell.on(wanted, (order[order.index(checkpoint) + 1], zero))
    zeros = _zeros(wanted, cell)
    if zero == zeros[0] and cell.pipeline == 1:
        yield from (cell.on(wanted, (checkpoint, more)) for more in zeros[1:])


def lighter(wanted: Wanted, cell: Cell) -> Iterator[Cell]:
    """The cells one rung below."""
    order, (checkpoint, zero) = wanted.checkpoints, cell.rung
    if wanted.kinds == "none" and checkpoint != order[0]:
        yield cell.on(wanted, (order[order.index(checkpoint) - 1], zero))
    if zero != (least := _zeros(wanted, cell)[0]) and cell.pipeline == 1:
        yield cell.on(wanted, (checkpoint, least))


def _sizes_of(wanted: Wanted, *, smallest: bool = False) -> Iterator[Cell]:
    """All sizes, without recomputation; with `smallest`, with one size of microbatches."""
    for sizes in meshes(wanted):
        is_divided = not wanted.shard_ranks or sizes.data * sizes.context % wanted.shard_ranks == 0
        if (wanted.zero == 2 and sizes.pipeline > 1) or not is_divided:
            continue
        microbatches = microbatch_sizes(wanted, sizes)[: 1 if smallest else None]
        for size, ranks in product(microbatches, _experts(wanted, sizes)):
            many = wanted.batch // (sizes.data * size)
            setup = replace(
                wanted.setup, tensor=sizes.tensor, data=sizes.data, context=sizes.context, microbatch_size=size, **ranks
            )
            for parallel, overlap in _splits(wanted, sizes):
                yield Cell(replace(setup, sequence_parallel=parallel, overlap=overlap), sizes.pipeline, many)


def _experts(wanted: Wanted, sizes: Sizes) -> list[dict[str, Any]]:
    """Expert ranks that divide the experts and the devices of a stage. Several have whole experts unless wanted
    otherwise; one has what its tensor ranks share.
    """
    model, devices = wanted.model, sizes.tensor * sizes.data * sizes.context
    found = []
    for ranks in [wanted.expert] if wanted.expert else divisors(model.experts):
        split = wanted.expert_tensor or (1 if ranks > 1 else sizes.tensor)
        if devices % (ranks * split):
            continue
        try:
            model.expert_parameters(ranks, split)
        except UsageError:
            continue
        found.append({"expert": ranks, "expert_tensor": split if model.experts > 1 else None})
    return found


def _splits(wanted: Wanted, sizes: Sizes) -> list[tuple[bool, bool]]:
    """Whether tensor ranks split the sequence, too, and whether collectives run beside computations. Neither takes time
    in a plan or needs bytes, so both are always on where they are possible, with two exceptions: a checkpoint "op"
    gathers a sequence once more, and an engine may have more buffers to overlap.
    """
    is_possible = sizes.tensor > 1 and takes(wanted, sizes.tensor, sizes.context, sequence_parallel=True)
    parallel = [True] * is_possible + [False] * (not is_possible or wanted.checkpoint == "op")
    overlap = [True] + [False] * (engine_named(wanted.setup.engine).bucket > 0)
    return [
        *product(
            parallel if wanted.sequence_parallel is None else [wanted.sequence_parallel],
            overlap if wanted.overlap is None else [wanted.overlap],
        )
    ]


def _zeros(wanted: Wanted, cell: Cell) -> tuple[int, ...]:
    """The `zero` to try, the lightest first. ZeRO-1 takes no time in a plan and saves bytes, so with replicas it is
    always on. ZeRO-2 is for one pipeline rank.
    """
    if wanted.zero is not None:
        return (wanted.zero,)
    if cell.setup.replicas == 1:
        return (0,)
    return (1, 2, 3) if cell.pipeline == 1 else (1, 3)
