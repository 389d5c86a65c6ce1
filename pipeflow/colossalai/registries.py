"""ColossalAI's `colossalai.registry`, and its `colossalai.builder` of models from registered layers. LAYERS and LOSSES
also have torch.nn's classes, OPTIMIZERS torch.optim's, and HOOKS those of `colossalai.trainer.hooks`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn, optim

from pipeflow.colossalai import hooks
from pipeflow.core.errors import UsageError
from pipeflow.core.partition import partition_uniform
from pipeflow.core.placement import Placement
from pipeflow.parallel.context import context_if_launched
from pipeflow.training.logging import get_dist_logger
from pipeflow.training.model.build import build_stages, cut_layers
from pipeflow.training.model.layers import Layers, named_layers
from pipeflow.training.model.registry import Registry, makers

DATASETS = Registry("DATASETS")
HOOKS = Registry("HOOKS", [hooks])
LAYERS = Registry("LAYERS", [nn])
LOSSES = Registry("LOSSES", [nn])
MODELS = Registry("MODELS")
OPTIMIZERS = Registry("OPTIMIZERS", [optim])


def build_pipeline_model(layers: Layers, num_chunks: int = 1, verbose: bool = False) -> nn.Module:
    """Makes this rank's part of a model given as a list of layers, cut by `partition_uniform`. Returns a module, or an
    nn.ModuleList if there are several chunks.

    Args:
        layers: as in `pipeflow.training.build_stages`.
        num_chunks: number of stages per rank.
        verbose: if True, rank 0 logs how the layers are cut.

    Raises UsageError as partition_uniform and build_stages do.
    """
    return _built(layers, num_chunks, "layer", verbose)


def build_pipeline_model_from_cfg(
    config: Sequence[Mapping[str, Any]],
    num_chunks: int = 1,
    partition_method: str = "parameter",
    verbose: bool = False,
) -> nn.Module:
    """Like `build_pipeline_model`, from a list with one dict per layer. A rank creates only the layers of its own
    stages.

    Args:
        config: dicts; "type" is a name in LAYERS (which has torch.nn's classes) or MODELS, the other entries are the
            arguments.
        num_chunks, verbose: as in `build_pipeline_model`.
        partition_method: "layer" cuts by partition_uniform, "parameter" by the number of parameters.

    Raises UsageError for another method or an invalid dict, and as `build_pipeline_model` does.
    """
    return _built(makers(config, LAYERS, MODELS), num_chunks, partition_method, verbose)


def _built(layers: Layers, num_chunks: int, method: str, verbose: bool) -> nn.Module:
    context = context_if_launched()
    size = 1 if context is None else context.pipeline_size
    placement = Placement.looped(size, num_chunks)
    if method == "layer":
        dealt = partition_uniform(len(named_layers(layers)), size, num_chunks)
        parts = [part for chunk in zip(*dealt, strict=True) for part in chunk]
    elif method == "parameter":
        parts = cut_layers(layers, placement.num_stages, "parameters")
    else:
        raise UsageError(f'partition_method must be "layer" or "parameter", got {method!r}')
    if verbose:
        listed = (f"{stage} on rank {placement.rank_of(stage)}: {part}" for stage, part in enumerate(parts))
        get_dist_logger().info(f"the layers (start, end) of each stage: {'; '.join(listed)}", ranks=[0])
    chunks = build_stages(layers, placement, partition=parts)
    return chunks[0] if len(chunks) == 1 else chunks
