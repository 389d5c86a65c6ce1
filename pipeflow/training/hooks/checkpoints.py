"""CheckpointHook: saves checkpoints of a run and resumes from them. Must not contain: how checkpoints are stored."""

from __future__ import annotations

import logging
import math
import os
import secrets
import tempfile
from pathlib import Path
from typing import Any, Literal

from pipeflow.core.errors import UsageError
from pipeflow.core.placement import require_positive
from pipeflow.engine.parallel.context import Context
from pipeflow.engine.parallel.transport.agreement import all_gather_object
from pipeflow.training.checkpoint.load import Loaded, latest_checkpoint, load_checkpoint
from pipeflow.training.checkpoint.manifest import keep_newest
from pipeflow.training.checkpoint.pieces import Names
from pipeflow.training.checkpoint.save import Saving, save_checkpoint
from pipeflow.training.engine import Step
from pipeflow.training.logging import get_dist_logger
from pipeflow.training.trainer import Hook, Trainer

LOG = logging.getLogger("pipeflow")
BEST = "best"  # the link to the best checkpoint
_BETTER = {"loss": "lowest", "accuracy": "highest"}


class CheckpointHook(Hook):
    """Saves checkpoints during `Trainer.fit`; a new run resumes from the newest complete checkpoint in the folder.

    A checkpoint holds the model, the optimizer with its loss scaler, learning rates, random states, epoch, step,
    position in the data and the state of hooks (`Hook.state_dict`). A run that is killed and resumed therefore ends
    with the same weights, bit for bit. The resumed run may have another number of pipeline, tensor or data ranks,
    another batch size or other accumulation. Then random states start again and sums are rounded in another order.

    Resuming within an epoch depends on the loader. A loader from `get_dataloader` continues under any layout. A loader
    with `state_dict` and `load_state_dict`, such as torchdata's StatefulDataLoader, needs the same number of data
    ranks. With any other loader the used batches are read again and skipped, so their order must be the same.

    At its end, also if it stops early, `fit` saves anything not saved yet. A second `fit` in the same process
    continues from the current state and reads no checkpoint.

    Args:
        folder: folder for the checkpoints of this run alone, on storage that all ranks share.
        every: number of epochs or steps between two checkpoints.
        unit: "epoch" saves after an epoch's evaluation, "step" after a step.
        keep: number of newest checkpoints to keep; None keeps all.
        best: name of an evaluation metric, such as "loss". The checkpoint of its best epoch is kept as well; the
            symbolic link `best` in the folder points to it.
        best_is: "lowest" or "highest", the better direction of `best`; the default is known for "loss" and "accuracy".
        asynchronous: write checkpoints while training goes on.
        resume: False starts from the beginning; a folder that has checkpoints is then an error.
        names: renames parameters in the checkpoint, as in `save_checkpoint`.

    Attributes:
        resumed_from: path of the checkpoint that training resumed from; None if it started from the beginning.
        best_value: best value of the metric `best` so far; NaN before the first.

    Raises UsageError for invalid arguments. Before training starts, raises UsageError on every rank if the folder
    cannot be written, or if it has checkpoints but no complete one. Also raises it if the newest checkpoint belongs to
    another model, other schedulers or other data.
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
        require_positive(every=every)
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
            raise UsageError(f"best={self.best!r} needs an evaluation after each epoch: pass a test_loader to fit")
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
        """The reason why this rank cannot write checkpoints; None if it can."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=".probe-", dir=self.folder) as probe:
                Path(probe, "file").write_bytes(b"written")
                if self.best is not None:
                    Path(probe, "link").symlink_to("file")
                    if os.path.lexists(self.folder / BEST) and not (self.folder / BEST).is_symlink():
                        return f"{self.folder / BEST} is not a link to the best checkpoint: choose another folder"
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
        """True if this epoch was evaluated and is the best so far; its value is then stored."""
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
        """Waits on all ranks for the running save, and links to it if it is the best."""
        if self._saving is None:
            return
        path, self._saving = self._saving.wait(), None
        if path.name == self._best_name:
            context = trainer.engine.model.context
            self._link_best(context)
            if context.rank == 0 and self.keep is not None:
                keep_newest(path, self.keep)  # the one that was the best

    def _link_best(self, context: Context) -> None:
        fault, fresh = None, self.folder / f".{BEST}.{secrets.token_hex(4)}"
        if context.rank == 0:
            try:
                fresh.symlink_to(self._best_name)
                fresh.replace(self.folder / BEST)
            except OSError as error:
                fault = f"the link to the best checkpoint cannot be made: {error}"
        _raise_together(context, fault)


def _name(trainer: Trainer) -> str:
    return f"step-{trainer.engine.steps:08d}"


def _state_of(path: Path, loaded: Loaded) -> dict[str, Any]:
    """The trainer's state in a checkpoint. Raises UsageError if it has none."""
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
