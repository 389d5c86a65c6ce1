"""Checkpoints of a run: saved every so often, and continued from. What must not live here: how they are stored."""

from __future__ import annotations

import logging
import math
import os
import tempfile
from pathlib import Path
from typing import Any, Literal

from pipeflow.checkpoint.load import Loaded, load_checkpoint
from pipeflow.checkpoint.newest import keep_newest, latest_checkpoint
from pipeflow.checkpoint.pieces import Names
from pipeflow.checkpoint.save import Saving, save_checkpoint
from pipeflow.core.errors import UsageError
from pipeflow.parallel.context import Context
from pipeflow.parallel.transport.agreement import all_gather_object
from pipeflow.training.engine import Step
from pipeflow.training.hook import Hook
from pipeflow.training.logging import get_dist_logger
from pipeflow.training.trainer import Trainer

LOG = logging.getLogger("pipeflow")
BEST = "best"  # the link to the best checkpoint
_BETTER = {"loss": "lowest", "accuracy": "highest"}


class CheckpointHook(Hook):
    """Saves checkpoints, and lets `Trainer.fit` continue from the newest one in the folder that is whole.

    A checkpoint has the model, the optimizer with its loss scaler, learning rates, torch's random states, epoch, step,
    the position in the data and what hooks keep (`Hook.state_dict`), so a run that was killed ends with the same
    weights, bit for bit. The layout may change: another number of pipeline, tensor or data ranks, another batch size,
    other accumulation; then random states start anew, and sums are rounded in another order. A loader of
    `get_dataloader` continues in mid-epoch under any layout. One with `state_dict` and `load_state_dict`, such as
    torchdata's StatefulDataLoader, continues under as many data ranks; with any other one the batches that were used
    are read again and skipped, so it must give them in the same order.

    A `fit` that ends, or stops early, saves what is not saved yet. A `fit` in a process that has trained already goes
    on from there and reads no checkpoint.

    Args:
        folder: of this run alone, which all ranks see.
        every: how many epochs, or steps, lie between two checkpoints.
        unit: "epoch", after its evaluation, or "step".
        keep: how many checkpoints to leave, the newest ones; None for all.
        best: the metric of the evaluation, such as "loss", whose best epoch is saved and kept besides; the link `best`
            in the folder points to it.
        best_is: whether the "lowest" or the "highest" value is best; known for "loss" and "accuracy".
        asynchronous: write while training goes on.
        resume: whether to continue; without it, a folder with checkpoints is an error.
        names: as `save_checkpoint` takes it.

    Attributes:
        resumed_from: the checkpoint that training continued from; None where it began anew.
        best_value: of the metric, so far.

    Raises UsageError for arguments that cannot work; and before training starts, on every rank: for a folder that
    cannot be written, whose checkpoints are all damaged, or are not of this model, these schedulers and this data.
    """

    priority = 60  # after what changes the state, before what shows it

    def __init__(
        self,
        folder: str | os.PathLike[str],
        every: int = 1,
        unit: Literal["epoch", "step"] = "epoch",
        *,
        keep: int | None = 2,
        best: str | None = None,
        best_is: Literal["lowest", "highest"] | None = None,
        asynchronous: bool = False,
        resume: bool = True,
        names: Names | None = None,
    ) -> None:
        if every < 1:
            raise UsageError(f"every must be at least 1, got {every}")
        if unit not in ("epoch", "step"):
            raise UsageError(f"unit must be 'epoch' or 'step', got {unit!r}")
        if keep is not None and keep < 1:
            raise UsageError(f"keep must be at least 1, or None for all checkpoints, got {keep}")
        direction = best_is or _BETTER.get(best or "loss")
        if direction not in ("lowest", "highest"):
            raise UsageError(f"say which {best} is best: best_is='lowest' or 'highest', got {best_is!r}")
        self.folder = Path(folder)
        self.every = every
        self.unit = unit
        self.keep = keep
        self.best = best
        self.asynchronous = asynchronous
        self.resume = resume
        self.names = names
        self.resumed_from: Path | None = None
        self.best_value = math.nan
        self._sign = 1 if direction == "lowest" else -1
        self._best_name = ""  # of its checkpoint
        self._is_evaluated = False
        self._saved = (0, 0)  # steps and epochs of the last checkpoint
        self._saving: Saving | None = None  # not waited for yet

    def state_dict(self) -> dict[str, Any]:
        return {} if self.best is None else {"best": self.best, "value": self.best_value, "name": self._best_name}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if state_dict["best"] == self.best:
            self.best_value, self._best_name = state_dict["value"], state_dict["name"]

    def before_fit(self, trainer: Trainer) -> None:
        if self.best is not None and trainer.test_loader is None:
            raise UsageError(f"best={self.best!r} takes an evaluation after each epoch: give fit a test_loader")
        context = trainer.engine.model.context
        _raise_together(context, self._fault(context))
        if trainer.engine.steps:
            return
        newest = latest_checkpoint(self.folder)
        there = any(path.is_dir() and not path.is_symlink() for path in self.folder.glob("step-*"))
        fault = None
        if there and newest is None:
            fault = f"{self.folder} has checkpoints, and none is whole: move them away to begin anew"
        elif newest is not None and not self.resume:
            fault = f"{self.folder} has checkpoints of another run: choose another folder, or continue with resume=True"
        _raise_together(context, fault)
        if newest is not None:
            self._continue(trainer, newest)

    def _fault(self, context: Context) -> str | None:
        """Why this rank cannot write checkpoints."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=".probe-", dir=self.folder) as probe:
                Path(probe, "file").write_bytes(b"written")
                if self.best is not None:
                    Path(probe, "link").symlink_to("file")
        except OSError as error:
            return f"checkpoints cannot be written on rank {context.rank}: {error}"
        return None

    def _continue(self, trainer: Trainer, path: Path) -> None:
        def check(loaded: Loaded) -> None:
            trainer.require_fits(_state_of(path, loaded))

        engine, context = trainer.engine, trainer.engine.model.context
        loaded = load_checkpoint(path, engine.model, engine.optimizer, names=self.names, check=check)
        trainer.load_state_dict(_state_of(path, loaded))
        self.resumed_from, self._saved = path, (engine.steps, trainer.epoch)
        if self._best_name and (self.folder / self._best_name).is_dir():
            self._link_best(context)  # where it was killed before it did
        if context.rank == 0:
            if not LOG.hasHandlers():
                get_dist_logger()  # a terminal shows it
            LOG.info("training continues from %s: %d epochs and %d steps", path, trainer.epoch, engine.steps)

    def after_step(self, trainer: Trainer, step: Step) -> None:
        if self.unit == "step" and trainer.engine.steps % self.every == 0:
            self._save(trainer)

    def before_evaluation(self, trainer: Trainer) -> None:
        self._is_evaluated = True

    def after_epoch(self, trainer: Trainer) -> None:
        if self._is_best(trainer) or (self.unit == "epoch" and trainer.epoch % self.every == 0):
            self._save(trainer)

    def _is_best(self, trainer: Trainer) -> bool:
        """Whether the evaluation of this epoch, if there was one, is the best so far, which is noted."""
        if self.best is None or not self._is_evaluated:
            return False
        self._is_evaluated, metrics = False, trainer.metrics["test"]
        if self.best not in metrics:
            raise UsageError(f"the evaluation has no metric {self.best!r}; it has {', '.join(metrics) or 'none'}")
        value, is_first = metrics[self.best], math.isnan(self.best_value)
        is_better = not math.isnan(value) if is_first else self._sign * value < self._sign * self.best_value
        if is_better:
            self.best_value, self._best_name = value, _name(trainer)
        return is_better

    def after_fit(self, trainer: Trainer) -> None:
        if (trainer.engine.steps, trainer.epoch) != self._saved:
            self._save(trainer)
        self._finish(trainer)

    def _save(self, trainer: Trainer) -> None:
        self._finish(trainer)
        engine, state = trainer.engine, trainer.state_dict()
        self._saving = save_checkpoint(
            self.folder / _name(trainer),
            engine.model,
            engine.optimizer,
            scheduler=engine.scheduler,
            step=engine.steps,
            data=state["position"]["place"],
            extra={"trainer": state},
            names=self.names,
            keep=self.keep,
            asynchronous=self.asynchronous,
        )
        self._saved = (engine.steps, trainer.epoch)
        if not self.asynchronous:
            self._finish(trainer)

    def _finish(self, trainer: Trainer) -> None:
        """Waits on all ranks for the save that is under way, and links to it where it is the best."""
        if self._saving is None:
            return
        path, self._saving = self._saving.wait(), None
        if path.name == self._best_name:
            context = trainer.engine.model.context
            self._link_best(context)
            if context.rank == 0 and self.keep is not None:
                keep_newest(path, self.keep)  # the one that was the best

    def _link_best(self, context: Context) -> None:
        fault, fresh = None, self.folder / f".{BEST}.new"
        if context.rank == 0:
            try:
                fresh.unlink(missing_ok=True)
                fresh.symlink_to(self._best_name)
                fresh.replace(self.folder / BEST)
            except OSError as error:
                fault = f"the link to the best checkpoint cannot be made: {error}"
        _raise_together(context, fault)


def _name(trainer: Trainer) -> str:
    return f"step-{trainer.engine.steps:08d}"


def _state_of(path: Path, loaded: Loaded) -> dict[str, Any]:
    """The trainer's. Raises UsageError for a checkpoint that has none."""
    if not (isinstance(loaded.extra, dict) and isinstance(loaded.extra.get("trainer"), dict)):
        raise UsageError(f"{path} was not saved by a CheckpointHook: choose another folder for this run")
    state: dict[str, Any] = loaded.extra["trainer"]
    return state


def _raise_together(context: Context, fault: str | None) -> None:
    """Raises UsageError on every rank for the first rank's fault, if there is one."""
    with context.alarm.raised_everywhere():
        faults = all_gather_object(context.world, fault)
    if found := next((each for each in faults if each is not None), None):
        raise UsageError(str(found))
