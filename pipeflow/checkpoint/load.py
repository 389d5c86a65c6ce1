"""Loading: a run's state out of a folder, under whatever layout it was saved."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from pipeflow.checkpoint import files, state
from pipeflow.checkpoint.files import Manifest
from pipeflow.checkpoint.pieces import Names, context_of, described_everywhere, held_by, require_same_model
from pipeflow.checkpoint.plans import Saved
from pipeflow.checkpoint.task import Task
from pipeflow.core.errors import UsageError
from pipeflow.optim.optimizer import by_name
from pipeflow.parallel.transport.agreement import all_gather, all_gather_object


@dataclass(frozen=True, slots=True)
class Loaded:
    """What `save_checkpoint` was told of the run."""

    step: int
    data: Any
    extra: Any


def load_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    scheduler: state.Scheduler | None = None,
    *,
    names: Names | None = None,
) -> Loaded:
    """Reads what `save_checkpoint` wrote, under whatever layout: the numbers of pipeline, tensor and data ranks, the
    chunks and the schedule are free to change, and weights keep their bits. Under the layout that saved it, torch's
    random states come back too, and the run goes on as if it had not stopped.

    All ranks call it together. Nothing is changed before every rank has found that the files are whole and of this
    model. Arguments are as for `save_checkpoint`; an optimizer gets its states and its groups' options. Load only what
    you trust: the format's metadata is a pickle.

    Raises UsageError, on the rank that noticed, for what is no checkpoint, is damaged, of another model or of a newer
    format, and PipelineError on the others.
    """
    context = context_of(model)
    with context.alarm.raised_everywhere():
        folder = files.find(Path(path))
        manifest = Manifest.read(folder)
        share = sorted(manifest.files)[context.rank :: context.world_size]
        Task(context, lambda: files.require_sound(folder, manifest.files, share)).wait()
        saved = Saved(folder)
        held = held_by(model, context, names)
        everyone: list[Any] = all_gather_object(context.world, [each.described() for each in held])
        shapes = {name: each.shape for name, each in described_everywhere(everyone).items()}
        require_same_model(path, shapes, state.weight_shapes(saved))
        states = None if optimizer is None else state.OptimizerLoad(by_name(optimizer, model), held, saved)
        random = state.random_pieces(context) if manifest.layout == context.layout else {}
        random = {name: piece for name, piece in random.items() if name in saved.tensors}
        pieces = {**state.weight_pieces(held), **({} if states is None else states.pieces), **random}
        run = saved.read([state.RUN])[state.RUN]
        if scheduler is not None and run["scheduler"] is None:
            raise UsageError(f"checkpoint {path} was saved without a scheduler: load it without one")
        all_gather(context.world, [0.0])  # from here on all ranks know that it can be loaded
        Task(context, lambda: saved.fill(pieces)).wait()
        if states is not None:
            states.apply(run.get("optimizer", {}))
        if scheduler is not None:
            scheduler.load_state_dict(run["scheduler"])
        state.restore_random(context, random)
        all_gather(context.world, [0.0])
    return Loaded(run["step"], run["data"], run["extra"])
