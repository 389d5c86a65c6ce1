"""Checkpoints: how a Trainer of a Pipeline saves and resumes. All ranks write a checkpoint together. Must not contain:
steps and evaluations.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from pipeflow.checkpoint.load import load_checkpoint
from pipeflow.checkpoint.save import save_checkpoint
from pipeflow.core.errors import UsageError
from pipeflow.huggingface.lazy_import import library
from pipeflow.huggingface.model.adapters import LOADED, has_adapters
from pipeflow.huggingface.model.saving import save_pretrained
from pipeflow.huggingface.training.random_states import DataRandom
from pipeflow.runtime.pipeline import Pipeline

transformers: Any = library()  # its types differ between versions
STATE = "pipeflow"
"""The folder in a checkpoint that `pipeflow.load_checkpoint` reads."""


class Checkpoints(transformers.Trainer):  # type: ignore[misc]  # as above
    """A Trainer whose checkpoints are those of a Pipeline, in folders that transformers reads."""

    model: Pipeline
    _drawing: DataRandom

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Saves the model to a folder that transformers reads. All ranks call it together."""
        self._save(output_dir)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save")

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        folder = Path(self.args.output_dir if output_dir is None else output_dir)
        save_pretrained(self.model, folder)
        if not self.args.should_save:
            return
        tokenizer = self.processing_class or getattr(self.data_collator, "tokenizer", None)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        torch.save(self.args, folder / "training_args.bin")

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        save_checkpoint(
            Path(output_dir, STATE),
            self.model,
            self.optimizer,
            scheduler=self.lr_scheduler,
            step=self.state.global_step,
        )

    def _save_rng_state(self, output_dir: str) -> None:
        """Does nothing: `_save_optimizer_and_scheduler` also saves the random states."""

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        load_checkpoint(self._state_in(resume_from_checkpoint), self.model)

    def _state_in(self, checkpoint: str) -> Path:
        path = Path(checkpoint, STATE)
        if not path.exists():
            made = "make the Pipeline with pipeflow.huggingface.from_pretrained(folder)"
            raise UsageError(
                f"{checkpoint} has no folder {STATE!r}, perhaps because of save_only_model=True: "
                f"{LOADED if has_adapters(Path(checkpoint)) else made}, and train without resume_from_checkpoint"
            )
        return path

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            loaded = load_checkpoint(self._state_in(checkpoint), self.model, self.optimizer, self.lr_scheduler)
            self._drawing = DataRandom(self.args.seed + loaded.step)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Does nothing: `_load_optimizer_and_scheduler` also loads the random states."""

    def _load_best_model(self) -> None:
        self._load_from_checkpoint(self.state.best_model_checkpoint)
