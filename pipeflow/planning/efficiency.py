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
        reduction: share of the bandwidth between nodes that gradient reductions reach.
        collective: time that a collective takes for each doubling of its group, independent of its size.
        transfer: share of the bandwidth inside a node that a transfer between stages reaches.
        transfer_start: fixed time of such a transfer, independent of its size.
        backward: the time of a backward's computations, without recomputed attention, relative to those of its forward.
        gradients: share of the bandwidth inside a node that gradient reductions reach; as `link` unless given.
        optimizer: share of the memory bandwidth that the optimizer's step reaches; as `memory` unless given.
        attention: share of the peak FLOP/s that attention's products reach, whatever their shape; by the kernel and the
            shape (`planning/attention.py`) unless given.
        fused: rate of fused attention, relative to that of its papers.
        contention: share of the device that a collective takes from the computations beside it. NCCL runs a ring inside
            a node on 16 of the 108 multiprocessors of an A100.

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
    contention: float = 0.15

    def __post_init__(self) -> None:
        for each in fields(self):
            number = getattr(self, each.name)
            if number is None:
                continue
            if not (math.isfinite(number) and number >= 0) or (each.name in SHARES and not number):
                kind = "positive" if each.name in SHARES else "not negative"
                raise UsageError(f"the efficiency {each.name!r} must be finite and {kind}, got {number!r}")

    @classmethod
    def of(cls, given: Mapping[str, float], like: str = "a100", precision: str = "") -> Efficiency:
        """PUBLISHED with the known coefficients of a device of REACHES in that precision. Coefficients in `given`, as
        in a cluster file, replace them. Raises UsageError for unknown names.
        """
        reached = REACHES[like]
        usual = reached.get("fp8", {}) if precision == "fp4" else {}  # as long as nobody published what 4 bits reach
        known = asdict(PUBLISHED) | dict(reached.get(precision, usual))
        if unknown := sorted(set(given) - set(known)):
            raise UsageError(f"unknown efficiency {', '.join(unknown)}; known: {', '.join(known)}")
        numbers: dict[str, Any] = known | dict(given)
        return cls(**numbers)


_LIMITED = {"products": 0.7}  # by its power: the more so, the more units compute


def _in_half(shares: Mapping[str, float]) -> dict[str, Mapping[str, float]]:
    return {"fp16": shares, "bf16": shares}


REACHES: Mapping[str, Mapping[str, Mapping[str, float]]] = {
    "a100": {},
    "a100-pcie": _in_half({"products": 0.82}),
    "h100": {**_in_half(_LIMITED), "fp8": _LIMITED | {"products": 0.54}},
    "h20": {"fp8": {"products": 0.54}},
    "mi250x": _in_half({"products": 0.77}),
    "mi300x": _in_half({"products": 0.6}),
}
"""Shares that differ much from A100's, per device that was measured (`Device.like`) and precision.

- H100 in 16 bits: MPT models of 0.8 to 70 billion parameters, trained by the same program on A100 and H100
  (llm-foundry), are planned with the same error on both with 0.7. Products alone reach 0.8 (ml-engineering's maximum
  achievable FLOP/s, where A100 reaches 0.87, A100 PCIe 0.81, MI250X 0.77 and MI300X 0.6).
- fp8: operands are scaled first. With 0.54, the plans of GPT3-5B, LLAMA2-7B and LLAMA2-13B on H100 without tensor ranks
  are near the times that NeMo 24.07 published. H20 has fewer units in the same power, so only this concerns it.
"""

SHARES = frozenset(
    {
        "products",
        "attention",
        "fused",
        "memory",
        "link",
        "network",
        "reduction",
        "transfer",
        "backward",
        "gradients",
        "optimizer",
    }
)

PUBLISHED = Efficiency(
    products=0.874,
    depth=124.0,
    rows=214.0,
    memory=0.866,
    forward_launch=0.00152,
    backward_launch=0.000329,
    sync=1.54e-05,
    link=0.733,
    network=0.999,
    reduction=0.408,
    collective=6.95e-05,
    transfer=0.295,
    transfer_start=0.000223,
)
"""Fitted on published steps of A100 clusters: 1,440 of one node and 26 of eight (vTrain's measurements of
Megatron-DeepSpeed), and the 8 of arXiv 2205.05198, table 5 (Megatron-LM). `python -m benchmarks planner` fits them
again, and shows how well they predict sources that they were not fitted on.
"""
