"""ColossalAI's hook of checkpoints."""

from __future__ import annotations

from torch import nn

import pipeflow.training as native
from pipeflow.core.errors import UsageError


class SaveCheckpointHook(native.CheckpointHook):
    """pipeflow's CheckpointHook: saves all that training needs, and continues from the newest checkpoint in its folder.

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
        super().before_fit(trainer)
