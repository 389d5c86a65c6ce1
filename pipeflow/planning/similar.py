"""How far to trust a plan: what its time and its memory leave out, in words, and how far plans of a kind of job were
from measured steps. Must not contain: how the errors are found (`benchmarks/planner.py` does that, with coefficients
that never saw the steps).
"""

from __future__ import annotations

from typing import NamedTuple

from pipeflow.planning.blocks import Transformer
from pipeflow.planning.cluster import Cluster
from pipeflow.planning.setup import Setup


class SimilarError(NamedTuple):
    """The errors of plans of one kind of job, as shares of the measured times.

    Attributes:
        kind: what the jobs have in common.
        rows: number of measured steps.
        sources: number of publishers that measured them; two at least.
        error: mean error, of all publishers alike, with coefficients that had seen no step of the publisher.
        most: nine of ten errors are expected to be at most this, for a publisher that was not among them.
    """

    kind: str
    rows: int
    sources: int
    error: float
    most: float


KINDS: dict[str, tuple[int, int, float, float]] = {
    # written by: python -m benchmarks planner --save
    "a100, 16 bits": (1474, 2, 0.081, 0.280),
    "a100, 16 bits, sharded weights": (142, 2, 0.043, 0.160),
    "h100, 16 bits, sharded weights": (39, 2, 0.078, 0.255),
    # end
}
"""By kind of job that at least two publishers measured: `SimilarError` without its name."""


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


def similar_error(model: Transformer, setup: Setup, cluster: Cluster | None) -> SimilarError | None:
    """The errors of plans of such jobs; None if not at least two publishers measured some."""
    kind = "" if cluster is None else kind_of(model, setup, cluster)
    return SimilarError(kind, *KINDS[kind]) if kind in KINDS else None


def said(model: Transformer, setup: Setup, cluster: Cluster | None) -> str:
    """The errors in a sentence; none for a plan without seconds."""
    if cluster is None:
        return ""
    if (found := similar_error(model, setup, cluster)) is None:
        return "how far this is off is not known: jobs like this were not measured by two publishers"
    return (
        f"similar jobs ({found.kind}; {found.rows:,} measured steps of {found.sources} publishers): "
        f"{found.error:.0%} off on average, nine of ten within {found.most:.0%}"
    )


def similar_values(model: Transformer, setup: Setup, cluster: Cluster | None) -> dict[str, object] | None:
    """The errors for programs."""
    found = similar_error(model, setup, cluster)
    return None if found is None else found._asdict()


ROUTED = "routers that send some experts more tokens than others (--imbalance)"
WHOLE_EXPERTS = (
    "experts on ranks of their own: each tensor rank has a part of every expert, so no token is sent (--expert)"
)
FOUR_BITS = "products in 4 bits, which are planned with the share of their peak that those in 8 bits reach"
SCALES = "scales of single blocks of numbers (fp8-block, mxfp8, nvfp4), which are planned as those of whole tensors"
ADAPTERS = "adapters, which learn instead of frozen weights (--lora-rank)"
HIDDEN = "all-to-all of experts that is hidden behind other computation (--overlap-experts)"


def uncounted(model: Transformer, cluster: Cluster | None) -> tuple[str, ...]:
    """Names of the parts that a plan of the model leaves out. `cluster`: None if the plan has no seconds."""
    found = {
        "communication between devices": cluster is None,
        "temporary buffers of single operations": True,
    }
    return tuple(text for text, is_left_out in found.items() if is_left_out)


def unpriced(model: Transformer, setup: Setup) -> tuple[str, ...]:
    """Costs of a model and a layout that no time includes, each in one line. Empty if all are included."""
    is_mixture = model.experts > 1
    found = {
        WHOLE_EXPERTS: is_mixture and setup.expert == 1 and setup.tensor * setup.replicas > 1,
        ROUTED: is_mixture and setup.expert > 1 and setup.imbalance == 1,
        HIDDEN: is_mixture and setup.expert > 1 and not setup.overlap_experts,
        ADAPTERS: setup.frozen and not setup.lora_rank,
        FOUR_BITS: setup.precision.products == "fp4",
        SCALES: setup.precision.name in ("fp8-block", "mxfp8", "nvfp4"),
    }
    return tuple(text for text, is_left_out in found.items() if is_left_out)
