"""Buffers that stages of several ranks have: of a whole module that was cut, one that several stages use. What must not
live here: parameters, whose ties are in gradients/.
"""

from __future__ import annotations

from torch import nn

from pipeflow.runtime.pipeline import Pipeline
from pipeflow.stages.stage import ModuleStage


def ranks_of_buffers(model: nn.Module) -> dict[int, tuple[int, ...]]:
    """By the id of each such buffer of this rank, the ranks of the pipeline that have it."""
    if not isinstance(model, Pipeline):
        return {}
    placement = model.schedule.placement
    return {
        id(chunk.get_buffer(name)): tuple(sorted({rank for stage in stages for rank in placement.ranks_of(stage)}))
        for chunk in model.chunks
        if isinstance(chunk, ModuleStage)
        for name, stages in chunk.shared_buffers.items()
    }
