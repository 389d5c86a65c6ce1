"""Saving: a run's state into a folder, by names and shapes that no layout changes, written by all ranks together."""

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
from pipeflow.checkpoint.storage import Content, to_bytes
from pipeflow.checkpoint.task import Task
from pipeflow.core.errors import PipeflowError, UsageError
from pipeflow.optim.optimizer import by_name
from pipeflow.parallel.context import Context

LOG = logging.getLogger("pipeflow")


class Saving:
    """A checkpoint that is being written; it gets its name when the last rank is done."""

    def __init__(self, job: Job, context: Context, *, aloud: bool) -> None:
        self.path = job.path
        self._job = job
        self._context = context
        self._complete = False
        self._task = Task(context, self._run_aloud if aloud else job.run)

    def _run_aloud(self) -> None:
        """Nobody may ever wait for this save, so that its failure is said at once."""
        try:
            self._job.run()
        except UsageError as error:
            LOG.error("rank %d: %s", self._context.rank, error)
            raise

    def wait(self) -> Path:
        """Returns the checkpoint's path once it is complete on all ranks, which call this together.

        Raises UsageError where writing failed, and PipelineError on every other rank.
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
        """Where a file system was too slow to show the last rank all parts."""
        if self._context.rank == 0:
            self._job.complete()


def save_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    scheduler: state.Scheduler | None = None,
    step: int | None = None,
    data: Any = None,
    extra: Any = None,
    names: Names | None = None,
    keep: int | None = None,
    asynchronous: bool = False,
) -> Saving:
    """Writes a run's state to the folder `path`, which all ranks must see; all of them call it together. Replicas
    share the writing. Until all is on disk, what was at `path` before stays what `load_checkpoint` reads, whenever
    a process is killed; what a killed save left behind goes with the next save beside it.

    Every weight and persistent buffer is stored under its name in the whole model: the name that it has within its
    stage, so stages must not number their blocks anew. A weight with two names is stored under both. Of buffers,
    those of the first replica are stored.

    Args:
        path: a name in a folder that only one run writes to, such as `runs/7/step-00001000`.
        model: a Pipeline, or any module that each rank has whole but for its split parameters.
        optimizer: its states and options are stored by the names of its parameters.
        scheduler: of the learning rate; that of rank 0 is stored, so all ranks' groups must be alike.
        step: how many steps the run has taken; `latest_checkpoint` compares it, and takes the last save where steps
            are equal or none is given.
        data: how far the data was read, by all replicas together: plain values and tensors, those of rank 0.
        extra: more of that kind.
        names: `names(stage, name)` gives a tensor's name in the whole model, where the module's own will not do.
        keep: how many checkpoints to leave in the folder that holds `path`, those that were begun last; by default all.
            What a link in the folder points to stays besides.
        asynchronous: return once this rank's part is copied to the CPU, and write while training goes on. Where that
            fails, the rank that failed logs an error at once, and `wait` raises it.

    Returns a Saving, whose `wait` all ranks call together; unless `asynchronous` it has nothing left to wait for.

    Raises UsageError on the rank that noticed what is wrong, or could not write, and PipelineError on the others.
    """
    if keep is not None and keep < 1:
        raise UsageError(f"keep must be at least 1, the checkpoint that is saved, got {keep}")
    if step is not None and (isinstance(step, bool) or not isinstance(step, int) or step < 0):
        raise UsageError(f"step must be a whole number, how many steps the run has taken, got {step!r}")
    context = context_of(model)
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
) -> Content:
    first_replica = context.data_rank == 0 and context.tensor_rank == 0
    pieces = state.weight_pieces([each for each in tensors if each.is_parameter or first_replica])
    values: dict[str, bytes] = {}
    if optimizer is not None:
        states, values, run["optimizer"] = state.optimizer_content(by_name(optimizer, model), tensors)
        pieces |= states
    if context.rank == 0:
        values[state.RUN] = to_bytes("data, extra or the scheduler", run)
    return Content(apart(pieces | state.random_pieces(context)), values)
