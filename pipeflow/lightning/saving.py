"""SavingStrategy: the part of a strategy that saves and loads. A checkpoint is a folder that `pipeflow.load_checkpoint`
reads, which has Lightning's checkpoint, without weights, among its values.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.strategies import ParallelStrategy

from pipeflow.checkpoint.load import load_checkpoint
from pipeflow.checkpoint.manifest import find
from pipeflow.checkpoint.save import save_checkpoint
from pipeflow.lightning.model import StepModel
from pipeflow.lightning.packed import packed, unpacked
from pipeflow.optim.whole import WholeGroups
from pipeflow.runtime.pipeline import Pipeline


class SavingStrategy(ParallelStrategy):  # type: ignore[misc]  # Lightning's types are not read
    """A strategy whose checkpoints any layout can load."""

    _prepared: StepModel | None
    _groups: WholeGroups | None = None
    _folder: Path | None = None

    @property
    def _is_cut(self) -> bool:
        return self._prepared is not None and isinstance(self._prepared.inner, Pipeline)

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """True: weights are loaded into the module that setup prepares."""
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The weights, until the module is cut; then nothing, since all ranks save them together."""
        return {} if self._is_cut else super().lightning_module_state_dict()

    def optimizer_state(self, optimizer: Any) -> Any:
        """The states, until the module is cut; then nothing, since all ranks save them together."""
        return {} if self._is_cut else super().optimizer_state(optimizer)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Saves weights, optimizer and Lightning's checkpoint to rank 0's `filepath`, a folder; numbers in its name may
        differ between replicas. All ranks call it together. Before the first batch, it is a file of Lightning's own.
        """
        if not self._is_cut:
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        assert self._prepared is not None
        with self._prepared.layers():
            save_checkpoint(
                self.broadcast(filepath),
                self._prepared.pipeline,
                self._optimizer,
                step=checkpoint["global_step"],
                extra=packed(checkpoint),
            )

    @property
    def _optimizer(self) -> Any:
        return self.optimizers[0] if self.optimizers else None

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> Any:
        """Lightning's checkpoint in a folder that `save_checkpoint` wrote under any layout, or a file of a run without
        a pipeline.
        """
        self._folder = None
        if not Path(checkpoint_path).is_dir():
            return super().load_checkpoint(checkpoint_path, weights_only)
        self._folder = find(Path(checkpoint_path))
        return unpacked(self._folder, weights_only)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Loads the weights, and in training also the optimizer's states, when the module is cut."""
        prepared, folder = self._prepared, self._folder
        assert prepared is not None
        if folder is None:
            whole = prepared.inner if self._is_cut else prepared.whole
            whole.load_state_dict(checkpoint["state_dict"], strict=strict)
            return

        def load(made: Pipeline) -> None:
            with prepared.layers():
                load_checkpoint(folder, made, self._optimizer)

        prepared.when_made(load)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Loads the states of a run without a pipeline; others are loaded with the weights."""
        if self._folder is None:
            states = checkpoint["optimizer_states"]
            if self._is_cut and self._groups is not None:
                states = [self._groups.part_of(each) for each in states]
            super().load_optimizer_state_dict({**checkpoint, "optimizer_states": states})
