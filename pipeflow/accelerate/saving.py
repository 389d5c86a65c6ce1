"""SavingAccelerator: the part of an Accelerator that saves and loads. The model and its optimizer are a checkpoint of
pipeflow, beside accelerate's files.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import accelerate
from accelerate.state import AcceleratorState

from pipeflow.accelerate.model import PreparedModel
from pipeflow.checkpoint.load import load_checkpoint
from pipeflow.checkpoint.manifest import find
from pipeflow.checkpoint.safetensors import save_safetensors
from pipeflow.checkpoint.save import save_checkpoint
from pipeflow.core.errors import UsageError
from pipeflow.parallel.context import Context
from pipeflow.runtime.pipeline import Pipeline

STATE = "pipeflow"
"""The folder of a saved state that `pipeflow.load_checkpoint` reads."""


class SavingAccelerator(accelerate.Accelerator):  # type: ignore[misc]  # accelerate has no types
    """accelerate's Accelerator, whose model and optimizer are saved for any layout."""

    _context: Context
    _model: PreparedModel | None
    _models: list[PreparedModel]
    _optimizers: list[Any]

    @property
    def _pipeline(self) -> Pipeline:
        if self._model is None:
            raise UsageError("this Accelerator has prepared no model")
        return self._model.pipeline

    def save_model(
        self, model: Any, save_directory: Any, max_shard_size: int | str = "10GB", safe_serialization: bool = True
    ) -> None:
        """Saves the whole model's weights to safetensors files, under the names of the module that was prepared. All
        ranks call it together. `max_shard_size` and `safe_serialization` have no effect.
        """
        save_safetensors(save_directory, self._pipeline)

    def get_state_dict(self, model: Any, unwrap: bool = True) -> Any:
        """The weights by name, if this rank has the whole model. Raises UsageError otherwise."""
        if model is self._model and self._context.pipeline_size * self._context.tensor_size > 1:
            raise UsageError(
                "a rank of a pipeline has a part of the weights only: write those of all ranks with "
                "accelerator.save_model(model, folder), or with accelerator.save_state(folder)"
            )
        return super().get_state_dict(model, unwrap)

    def save_state(self, output_dir: str | None = None, safe_serialization: bool = True, **options: Any) -> Any:
        """Like accelerate's `save_state`: besides its files, the folder has model and optimizer as a checkpoint of
        pipeflow, which any layout can load. All ranks call it together. Raises UsageError before the model's first
        call.
        """
        pipeline, [optimizer] = self._pipeline, self._optimizers or [None]
        with self._without_model():
            folder = super().save_state(output_dir, safe_serialization, **options)
        with self._layers():
            save_checkpoint(Path(folder, STATE), pipeline, optimizer and optimizer.optimizer, step=self.step)
        return folder

    def load_state(self, input_dir: str | None = None, load_kwargs: Any = None, **options: Any) -> None:
        """Like accelerate's `load_state`, from a folder that `save_state` wrote under any layout. Model and optimizer
        are loaded when the model is first called. All ranks call it together.
        """
        model, optimizers = self._model, list(self._optimizers)
        if model is None:
            raise UsageError("prepare the model before load_state")
        folder = Path(self._newest() if input_dir is None else input_dir, STATE)
        find(folder)
        with self._without_model(), self._as_process(0):
            super().load_state(input_dir, load_kwargs, **options)

        def load(made: Pipeline) -> None:
            with self._layers():
                load_checkpoint(folder, made, optimizers[0].optimizer if optimizers else None)

        model.when_made(load)

    def _newest(self) -> str:
        """The folder from which accelerate loads by default."""
        folders = [each for each in Path(self.project_dir or ".", "checkpoints").glob("*_*") if each.is_dir()]
        if not folders or not self.project_configuration.automatic_checkpoint_naming:
            raise UsageError("load_state needs the folder of a saved state")
        return str(max(folders, key=lambda each: int(each.name.rpartition("_")[2])))

    @contextmanager
    def _layers(self) -> Iterator[None]:
        """Inside the `with` block, torch's random numbers are those of this rank's layers."""
        assert self._model is not None
        assert self._model.layer_random is not None
        with self._model.layer_random():
            yield

    @contextmanager
    def _without_model(self) -> Iterator[None]:
        """Inside the `with` block, accelerate knows neither model nor optimizer."""
        before = self._models, self._optimizers
        self._models, self._optimizers = [], []
        try:
            yield
        finally:
            self._models, self._optimizers = before

    @contextmanager
    def _as_process(self, index: int) -> Iterator[None]:
        """Inside the `with` block, accelerate names this process's files like those of process `index`."""
        state = AcceleratorState._shared_state
        before = state["process_index"]
        state["process_index"] = index
        try:
            yield
        finally:
            state["process_index"] = before
