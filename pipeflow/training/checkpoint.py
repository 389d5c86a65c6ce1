"""Checkpoints: a run's state in a folder, by names and shapes that no layout changes, written by all ranks together.
How pieces, plans and files are made is in the files beside this one.
"""

from __future__ import annotations

import os
import pickle
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult
from torch.optim import Optimizer

from pipeflow.core.errors import PipeflowError, UsageError
from pipeflow.parallel.agreement import all_gather, all_gather_object
from pipeflow.parallel.context import Context, current_context, is_launched
from pipeflow.parallel.layout import Layout
from pipeflow.parallel.local import Hub, LocalTransport
from pipeflow.runtime.pipeline import Pipeline
from pipeflow.training import checkpoint_files as files
from pipeflow.training import checkpoint_state as state
from pipeflow.training.checkpoint_files import Digest, Manifest
from pipeflow.training.checkpoint_optimizer import NamedOptimizer, named
from pipeflow.training.checkpoint_pieces import Held, Names, described_everywhere, held_by, require_same_model
from pipeflow.training.checkpoint_plans import (
    Content,
    Saved,
    SavePlanner,
    divide,
    to_bytes,
    write,
    write_metadata,
)

StrPath = str | os.PathLike[str]


@dataclass(frozen=True, slots=True)
class Loaded:
    """What `save_checkpoint` was told of the run."""

    step: int
    data: Any
    extra: Any


class Saving:
    """A checkpoint that is being written; it gets its name when the last rank is done."""

    def __init__(self, job: _Job, context: Context) -> None:
        self.path = job.path
        self._job = job
        self._context = context
        self._error: Exception | None = None
        self._thread: threading.Thread | None = None
        self._complete = False

    def wait(self) -> Path:
        """Returns the checkpoint's path once it is complete on all ranks, which call this together.

        Raises UsageError where writing failed, and PipelineError on every other rank.
        """
        if self._complete:
            return self.path
        try:
            with self._context.alarm.raised_everywhere():
                if self._thread is not None:
                    self._thread.join()
                if self._error is not None:
                    raise UsageError(f"writing checkpoint {self.path} failed: {self._error}") from self._error
                all_gather(self._context.world, [0.0])
                if self._context.rank == 0:
                    self._job.complete()  # where a file system was too slow to show the last rank all parts
                all_gather(self._context.world, [0.0])
        except PipeflowError:
            if self._context.rank == 0:
                files.discard(self._job.temporary)
            raise
        self._complete = True
        return self.path

    def start(self, *, asynchronous: bool) -> None:
        """Writes, here or in a thread of its own, for whose end the interpreter waits."""
        if asynchronous:
            self._thread = threading.Thread(target=self._run, name=f"saving {self.path}")
            self._thread.start()
        else:
            self._run()

    def _run(self) -> None:
        try:
            self._job.run()
        except Exception as error:
            self._error = error


def save_checkpoint(
    path: StrPath,
    model: nn.Module,
    optimizer: Optimizer | NamedOptimizer | None = None,
    *,
    scheduler: state.Scheduler | None = None,
    step: int = 0,
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
        step: how many steps the run has taken; `latest_checkpoint` compares it.
        data: how far the data was read, by all replicas together: plain values and tensors, those of rank 0.
        extra: more of that kind.
        names: `names(stage, name)` gives a tensor's name in the whole model, where the module's own will not do.
        keep: how many checkpoints to leave in the folder that holds `path`; by default all.
        asynchronous: return once this rank's part is copied to the CPU, and write while training goes on.

    Returns a Saving, whose `wait` all ranks call together; unless `asynchronous` it has nothing left to wait for.

    Raises UsageError on the rank that noticed what is wrong, or could not write, and PipelineError on the others.
    """
    path = Path(path)
    if keep is not None and keep < 1:
        raise UsageError(f"keep must be at least 1, the checkpoint that is saved, got {keep}")
    context = _context_of(model)
    with context.alarm.raised_everywhere():
        held = held_by(model, context, names)
        run = {"step": step, "data": data, "extra": extra, "scheduler": scheduler and scheduler.state_dict()}
        planner = SavePlanner(_content(context, model, held, optimizer, run))
        if context.rank == 0:
            files.clean(path.parent)
        told = (planner.create_local_plan(), [each.described() for each in held], files.temporary_for(path))
        everyone: list[Any] = all_gather_object(context.world, told)
        plans, described, temporaries = map(list, zip(*everyone, strict=True))
        described_everywhere(described)
        divided, metadata = divide(plans)
        plan = divided[context.rank]
        planner = SavePlanner(planner.content.restricted(plan)) if asynchronous else planner
        job = _Job(path, temporaries[0], context.rank, context.layout, step, keep, plan, planner, metadata)
    saving = Saving(job, context)
    saving.start(asynchronous=asynchronous)
    if not asynchronous:
        saving.wait()
    return saving


def _content(
    context: Context,
    model: nn.Module,
    held: list[Held],
    optimizer: Optimizer | NamedOptimizer | None,
    run: dict[str, Any],
) -> Content:
    first_replica = context.data_rank == 0 and context.tensor_rank == 0
    pieces = state.weight_pieces([each for each in held if each.is_parameter or first_replica])
    values: dict[str, bytes] = {}
    if optimizer is not None:
        states, values, run["optimizer"] = state.optimizer_content(named(optimizer, model), model, held)
        pieces |= states
    if context.rank == 0:
        values[state.RUN] = to_bytes("data, extra or the scheduler", run)
    return Content(pieces | state.random_pieces(context), values)


@dataclass(frozen=True, slots=True)
class _Job:
    """What one rank writes. It meets the other ranks in the folder alone, so that it can run beside training: the one
    that finds everybody's part there completes the checkpoint.
    """

    path: Path
    temporary: Path
    rank: int
    layout: Layout
    step: int
    keep: int | None
    plan: SavePlan
    planner: SavePlanner
    metadata: Metadata

    def run(self) -> None:
        self.temporary.mkdir(parents=True, exist_ok=True)
        results = write(self.temporary, self.rank, self.plan, self.planner)
        names = {result.storage_data.relative_path for result in results}
        digests = {name: Digest.of(self.temporary / name) for name in names}
        files.write_durably(self.temporary / f"part-{self.rank}", pickle.dumps((results, digests)))
        if all((self.temporary / f"part-{rank}").exists() for rank in range(self.layout.world_size)):
            self.complete()

    def complete(self) -> None:
        """Gives the checkpoint its name; the first that asks does it."""
        folder = files.claim(self.temporary)
        if folder is None:
            return
        results: list[list[WriteResult]] = []
        digests: dict[str, Digest] = {}
        for rank in range(self.layout.world_size):
            part = folder / f"part-{rank}"
            written, of_rank = pickle.loads(part.read_bytes())
            part.unlink()
            results.append(written)
            digests |= of_rank
        write_metadata(folder, self.metadata, results)
        digests[".metadata"] = Digest.of(folder / ".metadata")
        Manifest(self.step, self.layout, digests).write(folder)
        files.publish(folder, self.path)
        if self.keep is not None:
            files.keep_newest(self.path, self.keep)


def load_checkpoint(
    path: StrPath,
    model: nn.Module,
    optimizer: Optimizer | NamedOptimizer | None = None,
    scheduler: state.Scheduler | None = None,
    *,
    names: Names | None = None,
) -> Loaded:
    """Reads what `save_checkpoint` wrote, under whatever layout: the numbers of pipeline, tensor and data ranks, the
    chunks and the schedule are free to change, and weights keep their bits. Under the layout that saved it, torch's
    random states come back too, and the run goes on as if it had not stopped.

    All ranks call it together. Nothing is changed before every rank has found that the files are whole and of this
    model. Arguments are as for `save_checkpoint`; an optimizer gets its states and its groups' options.

    Raises UsageError, on the rank that noticed, for what is no checkpoint, is damaged, of another model or of a newer
    format, and PipelineError on the others.
    """
    context = _context_of(model)
    with context.alarm.raised_everywhere():
        folder = files.find(Path(path))
        manifest = Manifest.read(folder)
        share = sorted(manifest.files)[context.rank :: context.world_size]
        files.require_sound(folder, manifest.files, share)
        saved = Saved(folder)
        held = held_by(model, context, names)
        everyone: list[Any] = all_gather_object(context.world, [each.described() for each in held])
        shapes = {name: each.shape for name, each in described_everywhere(everyone).items()}
        require_same_model(path, shapes, state.weight_shapes(saved))
        states = None if optimizer is None else state.OptimizerLoad(named(optimizer, model), model, held, saved)
        random = state.random_pieces(context) if manifest.layout == context.layout else {}
        random = {name: piece for name, piece in random.items() if name in saved.tensors}
        run = saved.read([state.RUN])[state.RUN]
        if scheduler is not None and run["scheduler"] is None:
            raise UsageError(f"checkpoint {path} was saved without a scheduler: load it without one")
        all_gather(context.world, [0.0])  # from here on all ranks know that it can be loaded
        with torch.no_grad():
            saved.fill(state.weight_pieces(held) | ({} if states is None else states.pieces) | random)
        if states is not None:
            states.apply(run.get("optimizer", {}))
        if scheduler is not None:
            scheduler.load_state_dict(run["scheduler"])
        state.restore_random(context, random)
        all_gather(context.world, [0.0])
    return Loaded(run["step"], run["data"], run["extra"])


def _context_of(model: nn.Module) -> Context:
    if isinstance(model, Pipeline):
        return model.context
    if is_launched():
        return current_context()
    device = torch.device("cpu")
    return Context(0, Layout(), device, LocalTransport(Hub(1), 0, device=device, timeout=60.0))


latest_checkpoint = files.latest_checkpoint

__all__ = ["Loaded", "Saving", "latest_checkpoint", "load_checkpoint", "save_checkpoint"]
