"""save_checkpoint: saves a run's state to a folder, by names and shapes that do not depend on the layout."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from pipeflow.checkpoint import folders, state
from pipeflow.checkpoint.job import Job
from pipeflow.checkpoint.pieces import LocalTensor, Names, apart, context_of, local_tensors
from pipeflow.checkpoint.storage import RankContent, to_bytes
from pipeflow.checkpoint.task import Task
from pipeflow.core.errors import PipeflowError, UsageError
from pipeflow.optim.optimizer import by_name
from pipeflow.optim.rates import Scheduler
from pipeflow.parallel.context import Context

LOG = logging.getLogger("pipeflow")


class Saving:
    """A checkpoint that is being written; `save_checkpoint` returns it. Its folder gets its name when the last rank is
    done.

    Args:
        job: this rank's part of the save.
        context: the ranks that save together.
        aloud: whether a failed save logs an error at once.

    Attributes:
        path: the checkpoint's path.
    """

    def __init__(self, job: Job, context: Context, *, aloud: bool) -> None:
        self.path = job.path
        self._job = job
        self._context = context
        self._complete = False
        self._task = Task(context, self._run_aloud if aloud else job.run)

    def _run_aloud(self) -> None:
        """Runs the save and logs an error at once, since the program may never call `wait`."""
        try:
            self._job.run()
        except UsageError as error:
            LOG.error("rank %d: %s", self._context.rank, error)
            raise

    def wait(self) -> Path:
        """Waits until the checkpoint is complete and returns its path. All ranks call it together.

        Raises UsageError on a rank that could not write, and PipelineError on the others.
        """
        if self._complete:
            return self.path
        try:
            with self._context.alarm.raised_everywhere():
                self._task.wait()
                Task(self._context, self._complete_late).wait()
        except PipeflowError:
            if self._context.rank == 0:
                folders.discard(self._job.temporary)
            raise
        self._complete = True
        return self.path

    def _complete_late(self) -> None:
        """Completes the checkpoint if a slow file system did not show the last rank all parts."""
        if self._context.rank == 0:
            self._job.complete()


def save_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    scheduler: Scheduler | None = None,
    step: int | None = None,
    data: Any = None,
    extra: Any = None,
    names: Names | None = None,
    keep: int | None = None,
    asynchronous: bool = False,
) -> Saving:
    """Saves a run's state to the folder `path`, on storage that all ranks share. All ranks call it together; replicas
    share the writing.

    If a process is killed during the save, `load_checkpoint` still reads the previous checkpoint at `path`; the next
    save in the same folder removes what the killed one left.

    Every weight and persistent buffer is stored under its name in the whole model. By default this is its name within
    its stage, so a stage must not number its blocks from 0 again. A weight with two names is stored under both. Buffers
    are those of the first replica.

    Args:
        path: the checkpoint's name in a folder that only one run writes to, such as `runs/7/step-00001000`.
        model: a Pipeline, or any module that every rank holds whole except for parameters split over tensor ranks.
        optimizer: optimizer whose states and options to save, by the names of its parameters.
        scheduler: learning-rate scheduler to save; rank 0's is stored, so groups must be the same on all ranks.
        step: number of steps taken; `latest_checkpoint` returns the checkpoint with the highest step. If steps are
            equal or missing, it returns the last save.
        data: position in the data of all replicas together, as plain values and tensors; rank 0's is stored.
        extra: further plain values and tensors; rank 0's are stored.
        names: `names(stage, name)` returns a tensor's name in the whole model, if its name in the stage differs.
        keep: number of checkpoints to keep in the folder of `path`, those begun last; by default all. Checkpoints that
            a link in the folder points to are kept as well.
        asynchronous: return after this rank's part is copied to the CPU, and write while training goes on. If that
            fails, the failed rank logs an error at once, and `wait` raises it.

    Returns a Saving; all ranks call its `wait` together. Without `asynchronous` it is already complete.

    Raises UsageError on a rank that noticed a mistake or could not write, and PipelineError on the others.
    """
    if keep is not None and keep < 1:
        raise UsageError(f"keep must be at least 1 (the checkpoint being saved), got {keep}")
    if step is not None and (isinstance(step, bool) or not isinstance(step, int) or step < 0):
        raise UsageError(f"step must be a whole number (of steps that the run has taken), got {step!r}")
    path, context = folders.path_of(path), context_of(model)
    with context.alarm.raised_everywhere():
        tensors = local_tensors(model, context, names)
        rates = None if scheduler is None else scheduler.state_dict()
        run = {"step": step, "data": data, "extra": extra, "scheduler": rates}
        content = _content(context, model, tensors, optimizer, run)
        specs = [each.spec for each in tensors]
        job = Job.agreed(context, path, content, specs, step=step, keep=keep, copying=asynchronous)
    saving = Saving(job, context, aloud=asynchronous)
    if not asynchronous:
        saving.wait()
    return saving


def _content(
    context: Context,
    model: nn.Module,
    tensors: list[LocalTensor],
    optimizer: Optimizer | None,
    run: dict[str, Any],
) -> RankContent:
    first_replica = context.data_rank == 0 and context.tensor_rank == 0
    pieces = state.weight_pieces([each for each in tensors if each.is_parameter or first_replica])
    values: dict[str, bytes] = {}
    if optimizer is not None:
        states, values, run["optimizer"] = state.optimizer_content(by_name(optimizer, model), tensors)
        pieces |= states
    if context.rank == 0:
        values[state.RUN] = to_bytes("data, extra or the scheduler", run)
    return RankContent(apart(pieces | state.random_pieces(context)), values)
