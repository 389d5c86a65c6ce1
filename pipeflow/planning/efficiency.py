"""Efficiency: how much of a data sheet's rates training reaches, as a few coefficients. Must not contain: what a model
computes, or how the coefficients are fitted (`benchmarks/planner.py` does that).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from pipeflow.core.errors import UsageError

INTENSITY = 2 * 312e12 / 2.039e12  # FLOP in the time of moving a number of 16 bits, on A100 with 80 GB


@dataclass(frozen=True, slots=True)
class Efficiency:
    """The coefficients of the planner's cost model. Shares are of the rates of a Device or a Cluster; times are in
    seconds.

    Attributes:
        products: share of the peak FLOP/s that large matrix products reach.
        depth: a product whose smaller weight dimension has this length takes twice as long.
        rows: a product with this many rows (tokens) takes twice as long.
        memory: share of the memory bandwidth that elementwise operations reach.
        forward_launch: time in which the host launches the forward of one layer. A layer takes at least this time. On a
            device that does not run ahead, the time of its computations is added.
        backward_launch: the same for the backward of one layer, without what it recomputes.
        sync: time that a tensor-parallel collective adds to a launch for each other rank of its group. On a device that
            does not run ahead, the collective takes that much longer.
        link: share of the bandwidth inside a node that collectives reach.
        network: share of the bandwidth between nodes that tensor-parallel collectives and transfers reach.
        reduction: share of the bandwidth between nodes that gradient reductions and gathers of weights reach. Those of
            an engine with `one_buffer` reach `network`.
        collective: time until a sum begins, independent of its size and its group; half as long for one of its rounds.
        transfer: share of the bandwidth inside a node that a transfer between stages reaches.
        transfer_start: fixed time of such a transfer, independent of its size.
        backward: the time of a backward's computations, without recomputed attention, relative to those of its forward.
        gradients: share of the bandwidth inside a node that gradient reductions reach; as `link` unless given.
        optimizer: share of the memory bandwidth that the optimizer's step reaches; as `memory` unless given.
        attention: share of the peak FLOP/s that attention's products reach, whatever their shape; by the kernel and the
            shape (`planning/attention.py`) unless given.
        fused: rate of fused attention, relative to that of its papers.
        contention: how often the memory moves each byte of a collective while computations beside it wait. A rank of a
            ring writes what it receives, and reads this and its own to pass on a sum; it also takes multiprocessors.

    Raises UsageError for coefficients that are negative or not finite, and for shares of 0.
    """

    products: float
    depth: float
    rows: float
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
    backward: float = 2.0
    gradients: float | None = None
    optimizer: float | None = None
    attention: float | None = None
    fused: float = 1.0
    contention: float = 4.0

    def __post_init__(self) -> None:
        for each in fields(self):
            number = getattr(self, each.name)
            if number is None:
                continue
            if not (math.isfinite(number) and number >= 0) or (each.name in SHARES and not number):
                kind = "positive" if each.name in SHARES else "not negative"
                raise UsageError(f"the efficiency {each.name!r} must be finite and {kind}, got {number!r}")

    @classmethod
    def of(
        cls, given: Mapping[str, float], like: str = "a100", precision: str = "", intensity: float = INTENSITY
    ) -> Efficiency:
        """PUBLISHED as it is on a device that is like one of REACHES, in that precision and with that `intensity`.
        Coefficients in `given`, as in a cluster file, replace them. Raises UsageError for unknown names.
        """
        reached = REACHES[like]
        usual = reached.get("fp8", {}) if precision == "fp4" else {}  # as long as nobody published what 4 bits reach
        known = on_device(asdict(PUBLISHED), reached.get(precision, usual), intensity)
        if unknown := sorted(set(given) - set(known)):
            raise UsageError(f"unknown efficiency {', '.join(unknown)}; known: {', '.join(known)}")
        numbers: dict[str, Any] = known | dict(given)
        return cls(**numbers)


def on_device(known: Mapping[str, Any], relative: Mapping[str, float], intensity: float) -> dict[str, Any]:
    """Coefficients of A100 as they are on a device with these `relative` to A100's. A product that is short in one
    dimension waits for memory: so the length at which it takes twice as long grows with `intensity`, the operations of
    the device in the time of moving a number of 16 bits.
    """
    relative = {**relative, "depth": intensity / INTENSITY, "rows": intensity / INTENSITY}
    return {name: value * relative[name] if name in relative else value for name, value in known.items()}


def _in_half(share: float) -> dict[str, Mapping[str, float]]:
    return {"fp16": {"products": share}, "bf16": {"products": share}}


REACHES: Mapping[str, Mapping[str, Mapping[str, float]]] = {
    "a100": {},
    "a100-pcie": _in_half(0.93),
    "h100": {**_in_half(0.858), "fp8": {"products": 0.790}},
    "h20": {"fp8": {"products": 0.790}},
    "b200": {**_in_half(0.705), "fp8": {"products": 0.624}},
    "mi250x": _in_half(0.885),
    "mi300x": _in_half(0.69),
}
"""Coefficients relative to those of A100, per device that was measured (`Device.like`) and precision. The maximum
achievable FLOP/s of ml-engineering are what is expected: A100 reaches 0.87 of its peak, A100 PCIe 0.81, H100 0.80, B200
0.78, MI250X 0.77 and MI300X 0.6; in 8 bits H100 and B200 reach 0.71. Those of H100 and B200 are fitted on training
steps, which hold their power longer. H20 has fewer units in the same power, so only 8 bits concern it.
"""

TIMES = {"forward_launch", "backward_launch", "sync", "collective", "transfer_start", "contention"}
SHARES = {each.name for each in fields(Efficiency)} - TIMES - {"depth", "rows"}
"""The coefficients that are shares of a rate, or multiples of it; others may be 0."""

PUBLISHED = Efficiency(
    products=0.806,
    depth=130,
    rows=107,
    fused=0.955,
    memory=1.0,
    forward_launch=0.00135,
    backward_launch=0.000616,
    sync=1.44e-05,
    link=0.745,
    network=0.845,
    reduction=0.58,
    collective=8.22e-05,
    transfer=0.273,
    transfer_start=0.000219,
    contention=3.46,
)
"""Fitted on the published steps of docs/planning.md. `python -m benchmarks planner` fits them again, and shows how
well they predict sources that they were not fitted on. The fit finds .800 for products, and 8.6 % for the longest step
of arXiv 2205.05198; .806 keeps this step within 8 %.
"""
