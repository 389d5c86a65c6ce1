"""Efficiency: how much of a data sheet's rates training reaches, as a few coefficients. Must not contain: what a model
computes, or how the coefficients are fitted (`benchmarks/planner.py` does that).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from pipeflow.core.errors import UsageError


@dataclass(frozen=True, slots=True)
class Efficiency:
    """The coefficients of the planner's cost model. Shares are of the rates of a Device or a Cluster; times are in
    seconds.

    Attributes:
        products: share of the peak FLOP/s that large matrix products reach.
        depth: of a product whose smaller weight dimension is this long, the time doubles.
        rows: of a product with this many rows (tokens), the time doubles.
        attention: share of the peak FLOP/s that attention's products reach.
        memory: share of the memory bandwidth that elementwise operations reach.
        forward_launch: time in which the host launches the forward of one layer. A layer takes at least that.
        backward_launch: the same for the backward of one layer, without what it recomputes.
        sync: time that a tensor-parallel collective adds to a launch for each other rank of its group.
        link: share of the bandwidth inside a node that collectives reach.
        network: share of the bandwidth between nodes that tensor-parallel collectives and transfers reach.
        reduction: share of the bandwidth between nodes that gradient reductions reach.
        collective: time that a collective takes for each doubling of its group, whatever it carries.
        transfer: share of the bandwidth inside a node that a transfer between stages reaches.
        transfer_start: time that such a transfer takes, whatever it carries.

    Raises UsageError for coefficients that are negative or not finite, and for shares of 0.
    """

    products: float
    depth: float
    rows: float
    attention: float
    memory: float
    forward_launch: float
    backward_launch: float
    sync: float
    link: float
    network: float
    reduction: float
    collective: float
    transfer: float
    transfer_start: float

    def __post_init__(self) -> None:
        for each in fields(self):
            number = getattr(self, each.name)
            if not (math.isfinite(number) and number >= 0) or (each.name in SHARES and not number):
                kind = "positive" if each.name in SHARES else "not negative"
                raise UsageError(f"the efficiency {each.name!r} must be finite and {kind}, got {number!r}")

    @classmethod
    def of(cls, given: Mapping[str, float]) -> Efficiency:
        """PUBLISHED, with the coefficients that are given in its place, as a cluster file holds them. Raises UsageError
        for unknown names.
        """
        known = asdict(PUBLISHED)
        if unknown := sorted(set(given) - set(known)):
            raise UsageError(f"unknown efficiency {', '.join(unknown)}; known: {', '.join(known)}")
        numbers: dict[str, Any] = known | dict(given)
        return cls(**numbers)


SHARES = frozenset({"products", "attention", "memory", "link", "network", "reduction", "transfer"})

PUBLISHED = Efficiency(
    products=0.944,
    depth=140.0,
    rows=110.0,
    attention=0.467,
    memory=0.775,
    forward_launch=1.51e-3,
    backward_launch=2.87e-4,
    sync=1.62e-5,
    link=0.811,
    network=1.0,
    reduction=0.408,
    collective=6.92e-5,
    transfer=0.284,
    transfer_start=2.15e-4,
)
"""Fitted on published steps of A100 clusters: 1,440 of one node and 26 of eight (vTrain's measurements of
Megatron-DeepSpeed), and the 8 of arXiv 2205.05198, table 5 (Megatron-LM). `python -m benchmarks planner` makes them again,
and shows how well they predict sources that they were not fitted on.
"""
