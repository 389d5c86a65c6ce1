"""Inputs: values of another type where a plan or a search takes a model, a setup and a cluster."""

from __future__ import annotations

from pipeflow.core.errors import require_type
from pipeflow.planning.blocks import Transformer
from pipeflow.planning.cluster import Cluster
from pipeflow.planning.setup import Setup
from pipeflow.planning.transformer import GPT
from pipeflow.planning.vit import ViT


def require_inputs(model: object, setup: object, cluster: object) -> None:
    """Raises UsageError with the line to write, such as `model_named("gpt3-175b")` for a name; None is no cluster."""
    if not isinstance(model, Transformer):
        require_type("model", model, (GPT, ViT), f"model_named({model!r}) has a model by its name")
    require_type("setup", setup, Setup, "Setup() has the usual settings")
    if cluster is not None:
        require_type("cluster", cluster, Cluster, f"Cluster.of({cluster!r}) has a cluster by the name of its device")
