"""ColossalAI's hook for checkpoints."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import nn

import pipeflow.training as native
from pipeflow.core.errors import UsageError
from pipeflow.parallel.transport.agreement import all_gather_object
from pipeflow.runtime.pipeline import Pipeline


class SaveCheckpointHook(native.CheckpointHook):
    """pipeflow's CheckpointHook: saves the state of training, and resumes from the newest checkpoint in its folder.

    If stages use the same names for their tensors, such as with an nn.ModuleList in each, names in the checkpoint
    include the stage; it can then only be loaded with the same number of stages.

    Args:
        interval: number of epochs between two checkpoints; with `save_by_iter` number of optimizer steps.
        checkpoint_dir: folder for the checkpoints of this run alone.
        model: the trained model, or None.
        save_by_iter: save by steps, not epochs.
        priority: as in BaseHook.

    Raises UsageError without a folder, and as CheckpointHook does; before training starts, for another model.
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
            raise UsageError("SaveCheckpointHook saves the trained model, but got another one: remove model")
        if _names_collide(trained):
            self.names = _by_stage
        super().before_fit(trainer)


def _by_stage(stage: int, name: str) -> str:
    return f"stages.{stage}.{name}"


def _names_collide(model: Pipeline) -> bool:
    """True if two stages have a tensor of the same name. All ranks call it together."""
    mine = [(index, name) for index, stage in model.runner.stages.items() for name in stage.module.state_dict()]
    with model.alarm.raised_everywhere():
        rows: list[Any] = all_gather_object(model.context.world, mine)
    told = {each for row in rows for each in row}
    return max(Counter(name for _, name in told).values(), default=0) > 1
