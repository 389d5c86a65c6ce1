"""Cells: layouts without schedule and cut, each at one level of saving memory, which is called its rung; the sizes that
a number of devices and a batch allow, and the errors if there are none. Must not contain: what layouts cost.

To recompute more, or to divide more among replicas (ZeRO-2, ZeRO-3), costs time and saves bytes. So a search begins
with the lightest rung of each cell, and climbs to a heavier one only where a layout does not fit. This loses nothing
where the same layout on a heavier rung is not faster. With ZeRO-3 on several pipeline ranks it may be, by some percent
in short steps, if gathers hide that ZeRO-1 does at the end of a step. So there it is no rung but a size: it is tried
from the beginning. Without a pipeline so is ZeRO-3 over the replicas of a node, which passes fewer bytes between two
nodes than ZeRO-1 over all replicas. A new dimension is a loop in `_sizes_of`, or another rung.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import chain, product
from typing import Any, NamedTuple

from pipeflow.core.errors import UsageError
from pipeflow.planning.blocks import divisors
from pipeflow.planning.device_map import map_devices
from pipeflow.planning.engines import engine_named
from pipeflow.planning.layout import Wanted
from pipeflow.planning.setup import ContextKind, Setup
from pipeflow.planning.shares import sequence_of

CONTEXT = 4096  # tokens of a sequence that a context rank has at least, unless their number is given
FAR = 4096  # how far from what is asked for a number of devices is looked for that works
NAMES = ("tensor", "pipeline", "context")  # of sizes that may be given


class Sizes(NamedTuple):
    """Numbers of tensor ranks, pipeline ranks, replicas, and context ranks of each replica."""

    tensor: int
    pipeline: int
    data: int
    context: int


class Rung(NamedTuple):
    """How a layout saves memory: its recomputation, its ZeRO stage, and the replicas of a group, if not all."""

    checkpoint: Any
    zero: int
    shards: int | None


class Cell(NamedTuple):
    """All of a layout but its schedule and its cut."""

    setup: Setup
    pipeline: int
    microbatches: int

    @property
    def rung(self) -> Rung:
        """How it saves memory."""
        return Rung(self.setup.checkpoint, self.setup.zero, self.setup.shard_ranks)

    def on(self, rung: Rung) -> Cell:
        """The same sizes on another rung."""
        return _on(self, rung)


@lru_cache(maxsize=65536)
def _on(cell: Cell, rung: Rung) -> Cell:
    """As `Cell.on`: a search asks for the rungs of a cell for each family."""
    if cell.rung == rung:
        return cell
    checkpoint, zero, shards = rung
    return cell._replace(setup=replace(cell.setup, checkpoint=checkpoint, zero=zero, shard_ranks=shards))


def cells(wanted: Wanted) -> Iterator[Cell]:
    """All combinations of sizes, microbatches and rungs that `wanted` allows."""
    for cell in _sizes_of(wanted):
        rungs = [*_begun(wanted, cell), *_climbed(wanted, cell)]
        yield from (cell.on(rung._replace(checkpoint=each)) for each, rung in product(wanted.checkpoints, rungs))


def lightest_cells(wanted: Wanted) -> Iterator[Cell]:
    """The cells on their lightest rung. With kinds that save memory in orders, a layout that fits may be slower than
    one that recomputes all, so all checkpoints are among them.
    """
    checkpoints = wanted.checkpoints if wanted.kinds != "none" else wanted.checkpoints[:1]
    for cell in _sizes_of(wanted):
        rungs = _begun(wanted, cell)
        yield from (cell.on(rung._replace(checkpoint=each)) for each, rung in product(checkpoints, rungs))


def leanest_cells(wanted: Wanted) -> Iterator[Cell]:
    """The cells that keep the fewest activations: in the smallest microbatches, with the most recomputation."""
    for cell in _sizes_of(wanted, smallest=True):
        rungs = [*_begun(wanted, cell), *_climbed(wanted, cell)]
        yield from (cell.on(rung._replace(checkpoint=wanted.checkpoints[-1])) for rung in rungs)


def heavier(wanted: Wanted, cell: Cell) -> Iterator[Cell]:
    """The cells one rung above."""
    order, rung = wanted.checkpoints, cell.rung
    if wanted.kinds == "none" and rung.checkpoint != order[-1]:
        yield cell.on(rung._replace(checkpoint=order[order.index(rung.checkpoint) + 1]))
    if rung._replace(checkpoint=order[0]) == _begun(wanted, cell)[0]:
        yield from (cell.on(more._replace(checkpoint=rung.checkpoint)) for more in _climbed(wanted, cell))


def lighter(wanted: Wanted, cell: Cell) -> Iterator[Cell]:
    """The cells one rung below."""
    order, rung = wanted.checkpoints, cell.rung
    if wanted.kinds == "none" and rung.checkpoint != order[0]:
        yield cell.on(rung._replace(checkpoint=order[order.index(rung.checkpoint) - 1]))
    if rung._replace(checkpoint=order[0]) in _climbed(wanted, cell):
        yield cell.on(_begun(wanted, cell)[0]._replace(checkpoint=rung.checkpoint))


def _sizes_of(wanted: Wanted, *, smallest: bool = False) -> Iterator[Cell]:
    """All sizes, without recomputation; with `smallest`, with one size of microbatches."""
    for sizes in meshes(wanted):
        is_divided = not wanted.shard_ranks or sizes.data * sizes.context % wanted.shard_ranks == 0
        if (wanted.zero == 2 and sizes.pipeline > 1) or not is_divided:
            continue
        given = wanted.microbatch_size
        microbatches = divisors(wanted.batch // sizes.data)[: 1 if smallest else None] if given is None else [given]
        splits, kinds = _splits(wanted, sizes), _context_kinds(wanted, sizes)
        for size, ranks in product(microbatches, _experts(wanted, sizes)):
            many = wanted.batch // (sizes.data * size)
            given_sizes = {"tensor": sizes.tensor, "data": sizes.data, "context": sizes.context, **ranks}
            for (parallel, overlap), kind in product(splits, kinds):
                ways: dict[str, Any] = {"sequence_parallel": parallel, "overlap": overlap, "context_kind": kind}
                setup = replace(wanted.setup, microbatch_size=size, **given_sizes, **ways)
                yield Cell(setup, sizes.pipeline, many)


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
    is_possible = sizes.tensor > 1 and _takes(wanted, sizes.tensor, sizes.context, sequence_parallel=True)
    parallel = [True] * is_possible + [False] * (not is_possible or wanted.checkpoint == "op")
    overlap = [True] + [False] * (engine_named(wanted.setup.engine).bucket > 0)
    return [
        *product(
            parallel if wanted.sequence_parallel is None else [wanted.sequence_parallel],
            overlap if wanted.overlap is None else [wanted.overlap],
        )
    ]


def _context_kinds(wanted: Wanted, sizes: Sizes) -> list[ContextKind]:
    """The ways to attend to the tokens of other context ranks: with "all-to-all", these share the heads."""
    if wanted.context_kind is not None:
        return [wanted.context_kind]
    shares_heads: list[ContextKind] = ["all-to-all"]
    shares_heads *= wanted.model.heads // sizes.tensor % sizes.context == 0
    return ["ring", *shares_heads, "gather"] if sizes.context > 1 else ["ring"]


def _begun(wanted: Wanted, cell: Cell) -> list[Rung]:
    """The rungs with the least recomputation that are tried from the beginning, the lightest first. ZeRO-1 takes no
    time in a plan and saves bytes, so with replicas it is always on.
    """
    least, shards = wanted.checkpoints[0], wanted.shard_ranks
    if wanted.zero is not None:
        zeros = [wanted.zero]
    else:
        zeros = [0] if cell.setup.replicas == 1 else [1] if cell.pipeline == 1 else [1, 3]
    found = [Rung(least, zero, shards if zero else None) for zero in zeros]
    is_free = shards is None and wanted.zero in (None, 3) and cell.pipeline == 1
    near = _in_node(wanted, cell.setup) if is_free else 1
    return [*found, Rung(least, 3, near)] if near > 1 else found


def _climbed(wanted: Wanted, cell: Cell) -> list[Rung]:
    """The rungs with the least recomputation that are tried where the first of `_begun` does not fit. ZeRO-2 is for one
    pipeline rank.
    """
    if wanted.zero is not None or cell.pipeline > 1 or cell.setup.replicas == 1:
        return []
    return [Rung(wanted.checkpoints[0], zero, wanted.shard_ranks) for zero in (2, 3)]


def _in_node(wanted: Wanted, setup: Setup) -> int:
    """How many replicas lie in a node, without a pipeline; 1 if all do."""
    mapped = map_devices(wanted.cluster, setup, 1)
    groups = [mapped.mesh(setup, kind).data_group for kind in range(len(mapped.kinds))]
    near = math.gcd(setup.replicas, *(group.in_node for group in groups))
    return near if near < setup.replicas else 1


def meshes(wanted: Wanted) -> list[Sizes]:
    """All sizes that fit the devices, the model and the batch. Raises UsageError if there are none; the error names the
    nearest number of devices, or the nearest batch, that has some.
    """
    split = list(_split(wanted, wanted.devices))
    if not split:
        raise UsageError(_no_devices(wanted))
    found = [sizes for sizes in split if not wanted.batch % _sequences(wanted, sizes)]
    if not found:
        raise UsageError(_no_batch(wanted, split))
    return found


def _split(wanted: Wanted, devices: int) -> Iterator[Sizes]:
    """The sizes whose product is `devices`, with the tensor and context ranks of a stage on one kind of nodes."""
    try:
        size = math.gcd(*(many for _, many in wanted.cluster.taken(devices)))
    except UsageError:  # there are fewer
        return
    for tensor in [wanted.tensor] if wanted.tensor else divisors(wanted.model.heads):
        if size % tensor or not _takes(wanted, tensor):
            continue
        ranks = devices // tensor
        contexts = [each for each in _contexts(wanted) if not size // tensor % each and _takes(wanted, tensor, each)]
        for pipeline in [wanted.pipeline] if wanted.pipeline else range(1, min(ranks, wanted.model.layers) + 1):
            if ranks % pipeline == 0:
                replicas = ranks // pipeline
                found = (Sizes(tensor, pipeline, replicas // each, each) for each in contexts if not replicas % each)
                yield from found


def _contexts(wanted: Wanted) -> list[int]:
    """Powers of 2 that leave each context rank CONTEXT tokens."""
    if wanted.context is not None:
        return [wanted.context]
    tokens = wanted.model.tokens if wanted.setup.sequence is None else wanted.setup.sequence
    return [1, *(2**power for power in range(1, 11) if tokens >= CONTEXT * 2**power)]


def _takes(wanted: Wanted, tensor: int, context: int = 1, *, sequence_parallel: bool | None = None) -> bool:
    """Whether the model can be split over `tensor` ranks, and a sequence over `context` ranks, and over all of them if
    it is `sequence_parallel`, by default as wanted. If the user asked for these sizes, the error that says why not is
    raised.
    """
    asked = bool(wanted.sequence_parallel)
    parallel = asked if sequence_parallel is None else sequence_parallel
    try:
        kind = wanted.context_kind or "ring"
        split = replace(wanted.setup, tensor=tensor, context=context, sequence_parallel=parallel, context_kind=kind)
        sequence_of(wanted.model, split)
    except UsageError:
        if parallel == asked and tensor in (1, wanted.tensor) and context in (1, wanted.context):
            raise
        return False
    return True


def _sequences(wanted: Wanted, sizes: Sizes) -> int:
    """The sequences that the batch must be a multiple of."""
    return sizes.data * (wanted.microbatch_size or 1)


def _no_devices(wanted: Wanted) -> str:
    fixed = [f"{name} {size}" for name in NAMES if (size := getattr(wanted, name))]
    works = _near(wanted, lambda devices: any(_split(wanted, devices)))
    advice = [] if works is None else [f"the nearest number that works is {works}"]
    advice += [
        f"with {wanted.devices} devices, {name} {' or '.join(map(str, sizes))} works"
        for name in NAMES
        if (sizes := _other_sizes(wanted, name))
    ]
    return f"{wanted.devices} devices do not divide into layouts with {'; '.join([' and '.join(fixed), *advice])}"


def _other_sizes(wanted: Wanted, name: str) -> list[int]:
    """The next smaller and the next larger value of the size `name` with which the devices divide."""
    asked = getattr(wanted, name)
    if asked is None:
        return []
    change: dict[str, Any] = {name: None}
    free = replace(wanted, **change)
    found = sorted({getattr(sizes, name) for sizes in _split(free, wanted.devices)})
    return [size for size in found if size < asked][-1:] + [size for size in found if size > asked][:1]


def _no_batch(wanted: Wanted, split: list[Sizes]) -> str:
    needed = {_sequences(wanted, sizes) for sizes in split}
    below = max(wanted.batch // each * each for each in needed)
    above = min(-(-wanted.batch // each) * each for each in needed)
    near = [str(batch) for batch in (below, above) if batch]
    replicas = " or ".join(str(data) for data in sorted({sizes.data for sizes in split})[:3])
    size = f" in microbatches of {wanted.microbatch_size}" if wanted.microbatch_size else ""
    works = _near(
        wanted,
        lambda devices: any(wanted.batch % _sequences(wanted, sizes) == 0 for sizes in _split(wanted, devices)),
    )
    advice = "" if works is None else f"; with this batch, the nearest number of devices that works is {works}"
    return (
        f"a batch of {wanted.batch} sequences does not divide over {replicas} replicas{size}: "
        f"the nearest that work{' are' if len(near) > 1 else 's is'} {' and '.join(near)}{advice}"
    )


def _near(wanted: Wanted, works: Callable[[int], bool]) -> int | None:
    """The nearest number of devices that works. If two are equally near, the smaller one."""
    around = chain.from_iterable((wanted.devices - away, wanted.devices + away) for away in range(1, FAR))
    return next((devices for devices in around if devices > 0 and works(devices)), None)
