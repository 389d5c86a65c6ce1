"""Saving and loading with a Booster: weights as Hugging Face or torch files, optimizers as pipeflow's checkpoints."""

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
from pipeflow.parallel.transport.agreement import all_gather

StrPath = str | os.PathLike[str]


class Checkpoints:
    """The methods of a Booster that save and load. All ranks call them together, and share the files."""

    plugin: HybridParallelPlugin

    def save_model(
        self,
        model: nn.Module,
        checkpoint: StrPath,
        shard: bool = False,
        size_per_shard: int = 1024,
        use_safetensors: bool = False,
    ) -> None:
        """Saves all weights, whole, by their names in the module.

        Args:
            model: the model that `boost` returned.
            checkpoint: a folder with `shard`, else a file.
            shard: write several safetensors files with an index; otherwise one file.
            size_per_shard: maximum size of such a file in MiB.
            use_safetensors: write the single file in safetensors format, instead of a state_dict with torch.save.

        Raises UsageError if the package safetensors is not installed.
        """
        path, boosted = Path(checkpoint), boosted_model(model)
        if shard:
            save_safetensors(path, boosted.inner, shard_bytes=size_per_shard * 2**20)
            return
        parts = files.beside(path)
        save_safetensors(parts, boosted.inner)
        self._on_rank_0(lambda: files.join(parts, path, use_safetensors=use_safetensors))

    def load_model(self, model: nn.Module, checkpoint: StrPath) -> None:
        """Loads all weights from files that `save_model` wrote under any layout, or from a folder of safetensors files,
        such as one of transformers' save_pretrained. A model from a LazyInitContext with several pipeline ranks is
        loaded when the first batch runs.

        Raises UsageError, before anything is changed, if a weight is missing or has another shape.
        """
        path, boosted = Path(checkpoint), boosted_model(model)
        is_of_torch = not path.is_dir() and files.is_of_torch(path)
        boosted.when_real(lambda: self._load(path, boosted, is_of_torch=is_of_torch))

    def _load(self, path: Path, boosted: BoostedModel, *, is_of_torch: bool) -> None:
        source = files.beside(path) if is_of_torch else path
        if is_of_torch:
            self._on_rank_0(lambda: files.divide(path, source))
        try:
            with self.plugin.context.alarm.raised_everywhere():
                rename = files.renames(source, boosted.names.values())
            load_safetensors(source, boosted.inner, rename)
        finally:
            if is_of_torch:
                self._on_rank_0(lambda: shutil.rmtree(source))

    def save_optimizer(self, optimizer: Optimizer, checkpoint: StrPath, shard: bool = False) -> None:
        """Saves the optimizer's states, together with the weights, as pipeflow's checkpoint in the folder `checkpoint`;
        `shard` has no effect. Raises UsageError before the first batch, and as `pipeflow.save_checkpoint` does.
        """
        boosted = boosted_optimizer(optimizer)
        save_checkpoint(checkpoint, boosted.model.pipeline, boosted.inner)

    def load_optimizer(self, optimizer: Optimizer, checkpoint: StrPath) -> None:
        """Loads states and weights that `save_optimizer` wrote under any layout. With several pipeline ranks they are
        loaded when the first batch runs. Raises UsageError as `pipeflow.load_checkpoint` does.
        """
        path, boosted = Path(checkpoint), boosted_optimizer(optimizer)
        find(path)
        boosted.model.when_made(lambda _: boosted.load(path))

    def save_lr_scheduler(self, lr_scheduler: Any, checkpoint: StrPath) -> None:
        """Saves the state of rank 0's learning-rate scheduler to the file `checkpoint`."""
        state = lr_scheduler.state_dict()
        self._on_rank_0(lambda: files.write(Path(checkpoint), lambda file: torch.save(state, file)))

    def load_lr_scheduler(self, lr_scheduler: Any, checkpoint: StrPath) -> None:
        """Loads a file of `save_lr_scheduler`. Raises UsageError if it is missing or damaged."""
        lr_scheduler.load_state_dict(files.read(Path(checkpoint)))

    def _on_rank_0(self, function: Callable[[], None]) -> None:
        """Calls `function` on rank 0, once all ranks have come here: another one may still read what it removes."""
        context = self.plugin.context
        with context.alarm.raised_everywhere():
            all_gather(context.world, [0.0])
            Task(context, function if context.rank == 0 else lambda: None).wait()


def boosted_model(model: nn.Module) -> BoostedModel:
    """Returns the model. Raises UsageError if it is not boosted."""
    if not isinstance(model, BoostedModel):
        raise UsageError(f"this needs the model that boost returned, got {type(model).__name__}")
    return model


def boosted_optimizer(optimizer: Optimizer) -> BoostedOptimizer:
    """Returns the optimizer. Raises UsageError if it is not boosted."""
    if not isinstance(optimizer, BoostedOptimizer):
        raise UsageError(f"this needs the optimizer that boost returned, got {type(optimizer).__name__}")
    return optimizer
