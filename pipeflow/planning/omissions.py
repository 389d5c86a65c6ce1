"""Uncounted: what the time and the memory of a plan leave out, in words. Must not contain: how they are shown."""

from __future__ import annotations

from pipeflow.planning.blocks import Transformer
from pipeflow.planning.cluster import Cluster
from pipeflow.planning.setup import Setup

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
