"""The saves and loads of a Booster: weights as Hugging Face's files or one of torch's, optimizers as checkpoints."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from pipeflow.checkpoint.manifest import find
from pipeflow.checkpoint.safetensors import load_safetensors, save_safetensors
from pipeflow.checkpoint.save import save_checkpoint
from pipeflow.checkpoint.task import Task
from pipeflow.colossalai.booster import files
from pipeflow.colossalai.booster.boosted import BoostedModel
from pipeflow.colossalai.booster.optimizer import BoostedOptimizer
from pipeflow.colossalai.booster.plugin import HybridParallelPlugin
from pipeflow.core.errors import UsageError

StrPath = str | os.PathLike[str]


class Checkpoints:
    """All ranks call these together, and see the same files."""

    plugin: HybridParallelPlugin

    def save_model(
        self,
        model: nn.Module,
        checkpoint: StrPath,
        shard: bool = False,
        size_per_shard: int = 1024,
        use_safetensors: bool = False,
    ) -> None:
        """Writes all weights, whole, by their names in the module: with `shard` to safetensors files of at most
        `size_per_shard` MiB in the folder `checkpoint`, with their index; else to one file, as torch.save writes a
        state_dict, or with `use_safetensors` in that format. Raises UsageError without the package safetensors.
        """
        path, boosted = Path(checkpoint), boosted_model(model)
        if shard:
            save_safetensors(path, boosted.inner, shard_bytes=size_per_shard * 2**20)
            return
        parts = files.beside(path)
        save_safetensors(parts, boosted.inner)
        self._on_rank_0(lambda: files.join(parts, path, use_safetensors=use_safetensors))

    def load_model(self, model: nn.Module, checkpoint: StrPath) -> None:
        """Fills all weights from what `save_model` wrote under any layout, or from a folder of safetensors files.

        Raises UsageError for weights that are missing or have another shape, before anything is changed.
        """
        path, boosted = Path(checkpoint), boosted_model(model)
        if path.is_dir() or not files.is_of_torch(path):
            load_safetensors(path, boosted.inner)
            return
        parts = files.beside(path)
        self._on_rank_0(lambda: files.divide(path, parts))
        try:
            load_safetensors(parts, boosted.inner)
        finally:
            self._on_rank_0(lambda: shutil.rmtree(parts))

    def save_optimizer(self, optimizer: Optimizer, checkpoint: StrPath, shard: bool = False) -> None:
        """Writes the optimizer's states, with the weights that they belong to, to the folder `checkpoint`, sharded or
        not: a checkpoint of pipeflow. Raises UsageError before the first batch, and as `pipeflow.save_checkpoint`.
        """
        boosted = boosted_optimizer(optimizer)
        save_checkpoint(checkpoint, boosted.model.pipeline, boosted.inner)

    def load_optimizer(self, optimizer: Optimizer, checkpoint: StrPath) -> None:
        """Reads what `save_optimizer` wrote under any layout, states and weights: under a pipeline as soon as the first
        batch has made it. Raises UsageError for what is no checkpoint, and as `pipeflow.load_checkpoint`.
        """
        path, boosted = Path(checkpoint), boosted_optimizer(optimizer)
        find(path)
        boosted.model.when_made(lambda _: boosted.load(path))

    def save_lr_scheduler(self, lr_scheduler: Any, checkpoint: StrPath) -> None:
        """Writes the state of rank 0's scheduler of the learning rate to the file `checkpoint`."""
        state = lr_scheduler.state_dict()
        self._on_rank_0(lambda: files.write(Path(checkpoint), lambda file: torch.save(state, file)))

    def load_lr_scheduler(self, lr_scheduler: Any, checkpoint: StrPath) -> None:
        """Reads what `save_lr_scheduler` wrote. Raises UsageError for a file that is missing or damaged."""
        lr_scheduler.load_state_dict(files.read(Path(checkpoint)))

    def _on_rank_0(self, function: Callable[[], None]) -> None:
        context = self.plugin.context
        with context.alarm.raised_everywhere():
            Task(context, function if context.rank == 0 else lambda: None).wait()


def boosted_model(model: nn.Module) -> BoostedModel:
    """The model. Raises UsageError for one that was not boosted."""
    if not isinstance(model, BoostedModel):
        raise UsageError(f"this takes the model that boost returned, got {type(model).__name__}")
    return model


def boosted_optimizer(optimizer: Optimizer) -> BoostedOptimizer:
    """The optimizer. Raises UsageError for one that was not boosted."""
    if not isinstance(optimizer, BoostedOptimizer):
        raise UsageError(f"this takes the optimizer that boost returned, got {type(optimizer).__name__}")
    return optimizer
