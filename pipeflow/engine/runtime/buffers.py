"""Buffers that stages of several ranks use, in a whole module that was cut. Must not contain: parameters, whose ties
are in gradients/.
"""

from __future__ import annotations

from torch import nn

from pipeflow.engine.runtime.pipeline import Pipeline
from pipeflow.engine.stages.stage import ModuleStage


def ranks_of_buffers(model: nn.Module) -> dict[int, tuple[int, ...]]:
    """Maps the id of each such buffer of this rank to the pipeline ranks that have it."""
    if not isinstance(model, Pipeline):
        return {}
    placement = model.schedule.placement
    return {
        id(chunk.get_buffer(name)): tuple(sorted({rank for stage in stages for rank in placement.ranks_of(stage)}))
        for chunk in model.chunks
        if isinstance(chunk, ModuleStage)
        for name, stages in chunk.shared_buffers.items()
    }
