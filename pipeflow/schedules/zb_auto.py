"""zb-auto: an order that is searched for, so that it fits the given costs and memory. Must not contain: the search."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from typing import TYPE_CHECKING, Literal

from pipeflow.core.cost import CostModel
from pipeflow.core.errors import UsageError
from pipeflow.core.placement import Placement
from pipeflow.core.schedule import Schedule

if TYPE_CHECKING:
    from pipeflow.schedules.orders.spilling import MemoryKind

ACTIONS = 1_800_000  # actions of all candidates together: about 2 s of search, up to 4 for large schedules
SLOWER = 20  # times as long an order takes if it may be within a cap by kinds that save memory


def zb_auto(
    ranks: int,
    microbatches: int,
    candidates: int | None = None,
    *,
    cost: CostModel | None = None,
    objective: Literal["makespan", "span"] = "makespan",
    memory_cap: float | Sequence[float] | None = None,
    bytes_cap: float | Sequence[float] | None = None,
    kinds: Literal["none", "offload", "recompute", "both"] = "none",
) -> Schedule:
    """Split backwards, in the best order found for given costs and memory.

    `cost` is a cost model with one stage per rank. The default has F = I = W and free transfers. `objective` is
    "makespan", the time of a step that ends with a barrier, or "span". The span is the measure of the papers, in which
    ranks may begin one after the other.

    `memory_cap` limits the activations kept on a rank, in microbatches. `bytes_cap` limits the bytes that forwards save
    and that waiting weight-gradient halves keep (`saved_bytes` and `deferred_bytes` of the cost). Pass one of them, as
    one number or one per rank. The default is R activations on every rank, as 1F1B keeps on the first.

    `kinds` says what may save memory where the cap does not allow an order. "offload" copies to the host, and `cost`
    must have the time of a copy. "recompute" computes again, and "both" uses both.

    `candidates` is the number of orders that are tried. By default, the search takes about 2 seconds.

    The result depends on the arguments only: the size sets how many candidates `pipeflow.search` tries. Its objective
    is never worse than the objective of any named schedule with one stage per rank and within the cap. Call `search`
    itself to learn how far from the best possible order the result is, to use other placements, or to search longer.

    Source: arXiv 2401.10241, section 3. Its ZB-1p and ZB-2p are such orders for the span, with caps of R and 2R whole
    activations in bytes. With M >= R, F = I = W and a cap of R activations, the bubble is at most (R-1)(F+I-W), as in
    ZB-H1.

    >>> from pipeflow import simulate
    >>> from pipeflow.draw import picture
    >>> print(picture(simulate(zb_auto(4, 4))))
    rank 0  F0 F1 F2 F3 .  .  .  I0 W0 I1 W1 I2 W2 I3 W3
    rank 1  .  F0 F1 F2 F3 .  I0 W0 I1 W1 I2 W2 I3 W3 .
    rank 2  .  .  F0 F1 F2 I0 F3 I1 W0 I2 W1 I3 W2 W3 .
    rank 3  .  .  .  F0 I0 F1 I1 F2 I2 F3 I3 W0 W1 W2 W3
    """
    from pipeflow.schedules.order_search import search  # which a command that only lists schedules does not need

    placement, saving = Placement.linear(ranks), kinds_named(kinds)
    actions = 3 * ranks * microbatches * (SLOWER if saving else 1)
    found = search(
        placement,
        microbatches,
        CostModel.even(placement) if cost is None else cost,
        objective=objective,
        memory_cap=ranks if memory_cap is None and bytes_cap is None else memory_cap,
        bytes_cap=bytes_cap,
        kinds=saving,
        budget=inf,
        candidates=min(max(ACTIONS // actions, 20), 3000) if candidates is None else candidates,
    )
    return found.schedule


KINDS: Mapping[str, tuple[MemoryKind, ...]] = {
    "none": (),
    "offload": ("offload",),
    "recompute": ("recompute",),
    "both": ("offload", "recompute"),
}


def kinds_named(name: str) -> tuple[MemoryKind, ...]:
    """The kinds that a word stands for. Raises UsageError for an unknown word."""
    if name not in KINDS:
        raise UsageError(f"kinds must be one of {', '.join(KINDS)}; got {name!r}")
    return KINDS[name]
