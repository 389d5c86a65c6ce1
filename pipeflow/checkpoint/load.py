"""Loading: a run's state out of a folder, under whatever layout it was saved."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from pipeflow.checkpoint import state
from pipeflow.checkpoint.manifest import Manifest, find, verified
from pipeflow.checkpoint.pieces import Names, Piece, context_of, local_tensors, require_same_model, whole_model
from pipeflow.checkpoint.storage import Storage, fill
from pipeflow.checkpoint.task import Task
from pipeflow.core.errors import UsageError
from pipeflow.optim.optimizer import by_name
from pipeflow.parallel.transport.agreement import all_gather, all_gather_object


@dataclass(frozen=True, slots=True)
class Loaded:
    """What `save_checkpoint` was told of the run; `step` is 0 where it was told none."""

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
    check: Callable[[Loaded], None] | None = None,
) -> Loaded:
    """Reads what `save_checkpoint` wrote, under whatever layout: the numbers of pipeline, tensor and data ranks, the
    chunks and the schedule are free to change, and weights keep their bits. Under the layout that saved it, torch's
    random states come back too, and the run goes on as if it had not stopped.

    All ranks call it together. Nothing is changed before every rank has found that the files are whole and of this
    model, and has read all that it needs. No code of a checkpoint runs, whoever wrote it; but its values are believed.
    Arguments are as for `save_checkpoint`; an optimizer gets its states and its groups' options, and a MasterWeights
    that is left out takes the loaded weights for its masters in its next step. `check` is called on every rank with
    what will be returned, before anything is changed; what it raises is raised everywhere.

    Raises UsageError, on the rank that noticed, for what is no checkpoint, is damaged, of another model or of a newer
    format, and PipelineError on the others.
    """
    context = context_of(model)
    with context.alarm.raised_everywhere():
        folder = find(Path(path))
        manifests: list[Manifest] = []
        Task(context, lambda: manifests.append(verified(folder, context.rank, context.world_size))).wait()
        storage = Storage(folder, manifests[0])
        tensors = local_tensors(model, context, names)
        everyone: list[Any] = all_gather_object(context.world, [tuple(each.spec) for each in tensors])
        shapes = {name: spec.shape for name, spec in whole_model(everyone).items()}
        require_same_model(path, shapes, state.weight_shapes(storage))
        run = state.read_run(storage)
        loaded = Loaded(run["step"] or 0, run["data"], run["extra"])
        if check is not None:
            check(loaded)
        if scheduler is not None and run["scheduler"] is None:
            raise UsageError(f"checkpoint {path} was saved without a scheduler: load it without one")
        states = None if optimizer is None else state.OptimizerLoad(by_name(optimizer, model), tensors, storage)
        same_layout = manifests[0].layout == context.layout
        random = state.saved_random(state.random_pieces(context), storage) if same_layout else {}
        weights = state.weight_pieces(tensors)
        Task(context, lambda: _read_ahead(storage, weights, {} if states is None else states.pieces, random)).wait()
        Task(context, lambda: fill(storage.parts_of(weights))).wait()
        if states is not None:
            states.apply(run.get("optimizer", {}))
        if scheduler is not None:
            scheduler.load_state_dict(run["scheduler"])
        state.restore_random(context, random)
        all_gather(context.world, [0.0])
    return loaded


def _read_ahead(
    storage: Storage, weights: Mapping[str, Piece], states: Mapping[str, Piece], random: Mapping[str, Piece]
) -> None:
    """Reads all that a load needs, and changes nothing of the run yet. Raises UsageError for what cannot be read."""
    fill(storage.parts_of({**states, **random}))  # into memory of their own
    state.require_random(random)
    for _ in storage.parts_of(weights):
        pass
