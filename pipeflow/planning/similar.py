"""How far to trust a plan: what its time and its memory leave out, in words, and how far plans of a kind of job were
from measured steps. Must not contain: how the errors are found (`benchmarks/planner.py` does that, with coefficients
that never saw the steps).
"""

from __future__ import annotations

from operator import ne
from typing import Any, NamedTuple

from pipeflow.planning.blocks import Transformer
from pipeflow.planning.cluster import Cluster
from pipeflow.planning.setup import Setup

KINDS: dict[str, tuple[int, int, float, float]] = {
    # written by: python -m benchmarks planner --save
    "a100, 16 bits": (1713, 9, 0.089, 0.231),
    "a100, 16 bits, frozen weights": (1506, 3, 0.111, 0.245),
    "a100, 16 bits, sharded weights": (1682, 7, 0.080, 0.218),
    "a100, 16 bits, sharded weights, frozen weights": (182, 4, 0.060, 0.232),
    "a100, 8 bits": (1564, 3, 0.103, 0.242),
    "a100, 8 bits, sharded weights": (184, 4, 0.061, 0.232),
    "b200, 16 bits": (1526, 5, 0.122, 0.256),
    "b200, 16 bits, sharded weights": (312, 5, 0.071, 0.217),
    "b200, 8 bits, sharded weights": (11, 2, 0.082, 0.246),
    "h100, 16 bits": (1684, 9, 0.092, 0.229),
    "h100, 16 bits, frozen weights": (20, 2, 0.099, 0.264),
    "h100, 16 bits, sharded weights": (175, 6, 0.073, 0.206),
    "h100, 16 bits, sharded weights, frozen weights": (133, 5, 0.071, 0.213),
    "h100, 8 bits": (71, 3, 0.062, 0.232),
    "h100, 8 bits, sharded weights": (182, 5, 0.052, 0.198),
    "h100, 8 bits, sharded weights, frozen weights": (8, 2, 0.063, 0.241),
    "v100, 16 bits": (1568, 5, 0.114, 0.263),
    "v100, 16 bits, frozen weights": (23, 2, 0.118, 0.269),
    "v100, 16 bits, sharded weights": (326, 5, 0.074, 0.229),
    "v100, 8 bits": (81, 2, 0.099, 0.263),
    # end
}
"""By kind of job that at least two publishers measured, or one that is near: the numbers of `similar_error`."""


class Kind(NamedTuple):
    """What a job has in common with others: the measured device that its own resembles, the bits of its products, and
    whether its weights are sharded or frozen, and it has experts.
    """

    device: str
    bits: str
    sharded: bool = False
    experts: bool = False
    frozen: bool = False

    def __str__(self) -> str:
        words = {"sharded weights": self.sharded, "experts": self.experts, "frozen weights": self.frozen}
        return ", ".join([self.device, self.bits, *(word for word, has in words.items() if has)])

    def is_near(self, other: Kind) -> bool:
        """Whether at most one of these is different, but for experts, whose errors are larger than those of others."""
        return sum(map(ne, self, other)) <= 1 and self.experts == other.experts


def kind_of(model: Transformer, setup: Setup, cluster: Cluster) -> Kind:
    """The kind of a job."""
    device = cluster.device
    bits = {"fp8": "8 bits", "fp4": "4 bits", "float32": "32 bits"}.get(setup.precision.products, "16 bits")
    like = device.name.partition("-")[0] if device.like == "a100" else device.like
    return Kind(like, bits, setup.zero == 3, model.experts > 1, setup.frozen)


def similar_error(model: Transformer, setup: Setup, cluster: Cluster | None) -> dict[str, Any] | None:
    """The errors of plans of such jobs, as shares of the measured times; None if not at least two publishers measured
    some. "kind": what the jobs have in common, of which one may differ. "rows": number of measured steps. "sources":
    number of publishers that measured them. "error": mean error, of all publishers alike, with coefficients that had
    seen no step of the publisher. "most": nine of ten errors are expected to be at most this, for a publisher that was
    not among them.
    """
    is_known = cluster is not None and not cluster.further and model.pattern is None
    kind = str(kind_of(model, setup, cluster)) if cluster is not None and is_known else ""
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
        "similar jobs ({kind}, or all but one of these; {rows:,} measured steps of {sources} publishers): {error:.0%} "
        "off on average, nine of ten within {most:.0%}"
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
        "divided weights of layers with experts and without, which are gathered as those of a mean layer": (
            len({*model.kinds}) > 1 and setup.zero > 1 and setup.shards > 1
        ),
        "how far scans are from their operations and bytes: no published step of a model with them was compared": (
            model.pattern is not None and "M" in model.pattern
        ),
        "the rate of the host's own Adam, which is that of one published host (host_step in a cluster file)": (
            setup.offload_optimizer > 0
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
