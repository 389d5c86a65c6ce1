"""How far to trust a plan: what its time and its memory leave out, in words, and how far plans of a kind of job were
from measured steps. Must not contain: how the errors are found (`benchmarks/planner.py` does that, with coefficients
that never saw the steps).
"""

from __future__ import annotations

from typing import Any

from pipeflow.planning.blocks import Transformer
from pipeflow.planning.cluster import Cluster
from pipeflow.planning.setup import Setup

KINDS: dict[str, tuple[int, int, float, float]] = {
    # written by: python -m benchmarks planner --save
    "a100, 16 bits": (1500, 3, 0.099, 0.279),
    "a100, 16 bits, sharded weights": (182, 4, 0.113, 0.313),
    "h100, 16 bits": (48, 2, 0.128, 0.344),
    "h100, 16 bits, sharded weights": (127, 4, 0.122, 0.299),
    # end
}
"""By kind of job that at least two publishers measured: the numbers of `similar_error`."""


def kind_of(model: Transformer, setup: Setup, cluster: Cluster) -> str:
    """The kind of a job: the measured device that its own resembles, the bits of products, whether weights are sharded,
    and whether there are experts or context ranks.
    """
    device = cluster.device
    bits = {"fp8": "8 bits", "fp4": "4 bits", "float32": "32 bits"}.get(setup.precision.products, "16 bits")
    parts = [device.name.partition("-")[0] if device.like == "a100" else device.like, bits]
    parts += ["sharded weights"] * (setup.zero == 3) + ["experts"] * (model.experts > 1)
    parts += ["frozen weights"] * setup.frozen
    return ", ".join(parts)


def similar_error(model: Transformer, setup: Setup, cluster: Cluster | None) -> dict[str, Any] | None:
    """The errors of plans of such jobs, as shares of the measured times; None if not at least two publishers measured
    some. "kind": what the jobs have in common. "rows": number of measured steps. "sources": number of publishers that
    measured them. "error": mean error, of all publishers alike, with coefficients that had seen no step of the
    publisher. "most": nine of ten errors are expected to be at most this, for a publisher that was not among them.
    """
    kind = "" if cluster is None else kind_of(model, setup, cluster)
    if kind not in KINDS:
        return None
    return {"kind": kind, **dict(zip(("rows", "sources", "error", "most"), KINDS[kind], strict=True))}


def said(model: Transformer, setup: Setup, cluster: Cluster | None) -> str:
    """The errors in a sentence; none for a plan without seconds."""
    if cluster is None:
        return ""
    if (found := similar_error(model, setup, cluster)) is None:
        return "how far this is off is not known: jobs like this were not measured by two publishers"
    return (
        "similar jobs ({kind}; {rows:,} measured steps of {sources} publishers): {error:.0%} off on average, nine of "
        "ten within {most:.0%}"
    ).format(**found)


def uncounted(cluster: Cluster | None) -> tuple[str, ...]:
    """Names of the parts that a plan leaves out. `cluster`: None if the plan has no seconds."""
    without_links = ("communication between devices",) if cluster is None else ()
    return *without_links, "temporary buffers of single operations"


def unpriced(model: Transformer, setup: Setup) -> tuple[str, ...]:
    """Costs of a model and a layout that no time includes, each in one line. Empty if all are included."""
    is_mixture, precision = model.experts > 1, setup.precision
    is_routed, is_whole = is_mixture and setup.expert > 1, is_mixture and setup.expert == 1
    found = {
        "experts on ranks of their own: each tensor rank has a part of every expert, so no token is sent (--expert)": (
            is_whole and setup.tensor * setup.replicas > 1
        ),
        "routers that send some experts more tokens than others (--imbalance)": is_routed and setup.imbalance == 1,
        "all-to-all of experts that is hidden behind other computation (--overlap-experts)": (
            is_routed and not setup.overlap_experts
        ),
        "adapters, which learn instead of frozen weights (--lora-rank)": setup.frozen and not setup.lora_rank,
        "products in 4 bits, which are planned with the share of their peak that those in 8 bits reach": (
            precision.products == "fp4"
        ),
        "scales of single blocks of numbers (fp8-block, mxfp8, nvfp4), which are planned as those of whole tensors": (
            precision.name in ("fp8-block", "mxfp8", "nvfp4")
        ),
    }
    return tuple(text for text, is_left_out in found.items() if is_left_out)
