"""ColossalAI's hook of checkpoints."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import nn

import pipeflow.training as native
from pipeflow.core.errors import UsageError
from pipeflow.parallel.transport.agreement import all_gather_object
from pipeflow.runtime.pipeline import Pipeline


class SaveCheckpointHook(native.CheckpointHook):
    """pipeflow's CheckpointHook: saves all that training needs, and continues from the newest checkpoint in its folder.

    Where stages have tensors of one name, as those of an nn.ModuleList in each do, the checkpoint names them by their
    stage, and is loaded into as many stages.

    Args:
        interval: epochs between two checkpoints, or steps of the optimizer with `save_by_iter`.
        checkpoint_dir: a folder of this run alone.
        model: the one that is trained, or None.

    Raises UsageError without a folder, and as pipeflow's; before training starts, for another model.
    """

    def __init__(
        self,
        interval: int = 1,
        checkpoint_dir: str | None = None,
        model: nn.Module | None = None,
        save_by_iter: bool = False,
        priority: int = native.CheckpointHook.priority,
    ) -> None:
        if checkpoint_dir is None:
            raise UsageError("SaveCheckpointHook needs a folder: pass checkpoint_dir")
        super().__init__(checkpoint_dir, interval, "step" if save_by_iter else "epoch")
        self.model = model
        self.priority = priority

    def before_fit(self, trainer: native.Trainer) -> None:
        trained = trainer.engine.model
        if self.model is not None and self.model not in (trained, trained.chunks, *trained.chunks):
            raise UsageError(
                "SaveCheckpointHook saves the model that is trained, and was given another: leave model out"
            )
        if _names_collide(trained):
            self.names = _by_stage
        super().before_fit(trainer)


def _by_stage(stage: int, name: str) -> str:
    return f"stages.{stage}.{name}"


def _names_collide(model: Pipeline) -> bool:
    """Whether two stages have a tensor of one name. All ranks call it together."""
    mine = [(index, name) for index, stage in model.runner.stages.items() for name in stage.module.state_dict()]
    with model.alarm.raised_everywhere():
        rows: list[Any] = all_gather_object(model.context.world, mine)
    told = {each for row in rows for each in row}
    return max(Counter(name for _, name in told).values(), default=0) > 1
