"""Uncounted: what the time and the memory of a plan leave out, in words. Must not contain: how they are shown."""

from __future__ import annotations

from pipeflow.planning.blocks import Transformer
from pipeflow.planning.cluster import Cluster

EXPERTS = (
    "expert parallelism (each tensor rank has a part of every expert, and gets every token: if experts lie on ranks of "
    "their own, add the all-to-all that sends tokens to them and back), and routers that send some experts more tokens "
    "than others"
)


def uncounted(model: Transformer, cluster: Cluster | None) -> tuple[str, ...]:
    """Names of the parts that a plan of the model leaves out. `cluster`: None if the plan has no seconds."""
    found = {
        "communication between devices": cluster is None,
        "temporary buffers of operations": True,
        EXPERTS: model.experts > 1,
    }
    return tuple(text for text, is_left_out in found.items() if is_left_out)
