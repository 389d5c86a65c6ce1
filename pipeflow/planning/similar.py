"""Similar: how far plans of a kind of job were from measured steps. Must not contain: how the errors are found
(`benchmarks/planner.py` does that, with coefficients that never saw the steps).
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
        error: mean error.
        most: nine of ten errors are at most this.
    """

    kind: str
    rows: int
    error: float
    most: float


KINDS: dict[str, tuple[int, float, float]] = {
    # written by: python -m benchmarks planner --save
    "a100, 16 bits": (1474, 0.111, 0.198),
    "a100, 16 bits, sharded weights": (142, 0.038, 0.073),
    "h100, 16 bits, sharded weights": (39, 0.038, 0.069),
    "h100, 8 bits": (12, 0.037, 0.078),
    "h100, 8 bits, sharded weights": (2, 0.061, 0.093),
    "v100, 16 bits": (17, 0.156, 0.306),
    # end
    # written by: python -m benchmarks mixtures --save
    "h100, 16 bits, experts": (8, 0.039, 0.114),
    "h100, 16 bits, sharded weights, experts": (1, 0.584, 0.584),
    "h100, 8 bits, experts": (1, 0.020, 0.020),
    # end of mixtures
}
"""By kind of job: number of measured steps, mean error, and what nine of ten errors are at most."""


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
    """The errors of plans of such jobs; None if no such job was compared."""
    kind = "" if cluster is None else kind_of(model, setup, cluster)
    return SimilarError(kind, *KINDS[kind]) if kind in KINDS else None


def said(model: Transformer, setup: Setup, cluster: Cluster | None) -> str:
    """The errors in a sentence; none for a plan without seconds."""
    if cluster is None:
        return ""
    if (found := similar_error(model, setup, cluster)) is None:
        return "no plan of a similar job was compared with a measured step"
    return (
        f"similar jobs ({found.kind}; {found.rows:,} measured steps): {found.error:.0%} off on average, nine of ten "
        f"within {found.most:.0%}"
    )


def similar_values(model: Transformer, setup: Setup, cluster: Cluster | None) -> dict[str, object] | None:
    """The errors for programs."""
    found = similar_error(model, setup, cluster)
    return None if found is None else found._asdict()
