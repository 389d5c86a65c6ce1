"""load_checkpoint: loads a run's state from a folder, under any layout; latest_checkpoint: finds the newest that is
whole.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

from torch import Tensor, nn
from torch.optim import Optimizer

from pipeflow.core.errors import UsageError
from pipeflow.engine.parallel.context import Context
from pipeflow.engine.parallel.transport.agreement import all_gather, all_gather_object
from pipeflow.training.checkpoint import state
from pipeflow.training.checkpoint.folders import path_of
from pipeflow.training.checkpoint.manifest import LEFT_OUT, LOG, Manifest, find, saved_in_order, verified
from pipeflow.training.checkpoint.pieces import (
    Names,
    Pieces,
    context_of,
    local_tensors,
    require_same_model,
    whole_model,
    wholes,
)
from pipeflow.training.checkpoint.storage import CheckpointStorage, fill
from pipeflow.training.checkpoint.task import Task, context_here
from pipeflow.training.optim.optimizer import by_name
from pipeflow.training.optim.rates import Scheduler


@dataclass(frozen=True, slots=True)
class Loaded:
    """The arguments of `save_checkpoint` that describe the run.

    Attributes:
        step: number of steps taken; 0 if none was given.
        data: position in the data, as given; None if none was.
        extra: further values, as given; None if none were.
    """

    step: int
    data: Any
    extra: Any


def load_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    scheduler: Scheduler | None = None,
    *,
    names: Names | None = None,
    check: Callable[[Loaded], None] | None = None,
) -> Loaded:
    """Loads a checkpoint of `save_checkpoint` and returns its step, data and extra values. All ranks call it together.

    The layout may differ from that of the save: the number of pipeline, tensor and data ranks, the chunks and the
    schedule. Weights keep their bits. Under the same layout, each rank's random states of torch, Python and numpy are
    restored, too, and the run continues as if it had not stopped.

    Nothing is changed until every rank has checked the files and has read all that it needs. No code in a checkpoint is
    run, even if its source is untrusted. Its values are not checked.

    Args:
        path: the checkpoint's folder.
        model: as in `save_checkpoint`; its weights and buffers are loaded.
        optimizer: gets its states and its groups' options. If a MasterWeights is not passed, it copies the loaded
            weights to its masters in its next step.
        scheduler: learning-rate scheduler that gets its state.
        names: as in `save_checkpoint`.
        check: called on every rank with the result before anything is changed; its error is raised on every rank.

    Raises UsageError if the path is not a checkpoint, or if the checkpoint is damaged, of another model or of a newer
    format. The rank that noticed it raises UsageError, and the others raise PipelineError.
    """
    path, context = path_of(path), context_of(model)
    with context.alarm.raised_everywhere():
        folder = find(path)
        manifests: list[Manifest] = []
        Task(context, lambda: manifests.append(verified(folder, context.rank, context.world_size))).wait()
        storage = CheckpointStorage(folder, manifests[0])
        tensors = local_tensors(model, context, names)
        told = str(path), manifests[0].content, [tuple(each.spec) for each in tensors]
        everyone: list[Any] = all_gather_object(context.world, told)
        _require_one([each[:2] for each in everyone])
        shapes = {name: spec.shape for name, spec in whole_model([specs for _, _, specs in everyone]).items()}
        require_same_model(path, shapes, state.weight_shapes(storage))
        run = state.read_run(storage)
        loaded = Loaded(run["step"] or 0, run["data"], run["extra"])
        if check is not None:
            check(loaded)
        if scheduler is not None and run["scheduler"] is None:
            raise UsageError(f"checkpoint {path} was saved without a scheduler: call load_checkpoint without one")
        stepping = None if optimizer is None else by_name(optimizer, model)
        states, stepped = ({}, {}) if stepping is None else state.optimizer_room(stepping, tensors, storage)
        same_layout = manifests[0].layout == context.layout
        random = state.saved_random(state.random_states(context, storage.tensors), storage) if same_layout else {}
        weights = state.weight_pieces(tensors)
        Task(context, lambda: _read_ahead(storage, weights, states, random)).wait()
        Task(context, lambda: fill(storage.parts_of(weights))).wait()
        if stepping is not None:
            stepping.load_state_dict({**run.get("optimizer", {}), **stepped})
        if scheduler is not None:
            scheduler.load_state_dict(run["scheduler"])
        state.restore_random(context, random)
        all_gather(context.world, [0.0])
    return loaded


def _require_one(everyone: Sequence[tuple[str, str]]) -> None:
    """Raises UsageError on all ranks unless they load one checkpoint, given each rank's path and its content."""
    for rank, (path, content) in enumerate(everyone):
        if content != everyone[0][1]:
            raise UsageError(
                f"rank 0 loads {everyone[0][0]} and rank {rank} {path}, which are different checkpoints: pass the same "
                "path on all ranks; nothing was loaded"
            )


def load_options(folder: Path, optimizer: Optimizer, groups: Sequence[Sequence[str]]) -> None:
    """Gives the groups of an optimizer the options that a checkpoint has for them, such as learning rates, before there
    is a Pipeline whose states can be loaded.

    Args:
        folder: the checkpoint, as `find` returns it.
        optimizer: an optimizer of the whole module.
        groups: the names of each group's parameters in the module.

    Raises UsageError if the checkpoint has no such options.
    """
    storage = CheckpointStorage(folder, verified(folder, 0, 0))
    for group, options in zip(optimizer.param_groups, state.options_of_groups(groups, storage), strict=True):
        group.update(options)


def _read_ahead(storage: CheckpointStorage, weights: Pieces, states: Pieces, random: Mapping[str, Tensor]) -> None:
    """Reads all that a load needs, without changing the run. Raises UsageError for values that cannot be read."""
    fill(storage.parts_of({**states, **wholes(random)}))  # into their own memory
    state.require_random(random)
    for _ in storage.parts_of(weights):
        pass


def latest_checkpoint(folder: str | os.PathLike[str], *, verify: bool = True) -> Path | None:
    """Returns the newest complete checkpoint in `folder`, None if there is none. It is the one with the highest step.
    If steps are equal, it is the one whose save began last. A checkpoint that was saved without a step counts as having
    the highest step before it. Damaged checkpoints are skipped with a warning in the logger "pipeflow".

    Args:
        folder: the folder that contains the checkpoints.
        verify: if True, check the digest of every file and read everything in the index. If pipeflow was launched, all
            ranks must then call it together: each checks a share of the files, and all get the same answer. If False,
            only the sizes of files are checked, and any rank may call it alone. `load_checkpoint` always verifies.

    Raises PipelineError if a rank failed.
    """
    if not verify:
        return _first_whole(_newest_first(Path(folder)), lambda path: _fault(path, 0, 0))
    context = context_here()
    with context.alarm.raised_everywhere():
        names = [str(path) for path in _newest_first(Path(folder))] if context.rank == 0 else None
        of_rank_0 = cast(list[str], all_gather_object(context.world, names)[0])
        return _first_whole(map(Path, of_rank_0), partial(_fault_anywhere, context), warn=context.rank == 0)


def _first_whole(paths: Iterable[Path], fault_of: Callable[[Path], str | None], *, warn: bool = True) -> Path | None:
    for path in paths:
        if (fault := fault_of(path)) is None:
            return path
        if warn:
            LOG.warning(LEFT_OUT, path, fault)
    return None


def _fault(path: Path, rank: int, ranks: int) -> str | None:
    """The fault of a checkpoint, None if it has none. `rank` checks its share of the files' contents, one of `ranks`
    shares; none if `ranks` is 0.
    """
    try:
        folder = find(path)
        manifest = verified(folder, rank, ranks)
        if ranks:
            storage = CheckpointStorage(folder, manifest)
            storage.require_readable(rank, ranks)
            state.read_run(storage)
    except UsageError as error:
        return str(error)
    return None


def _fault_anywhere(context: Context, path: Path) -> str | None:
    """The first fault that a rank found in its share, None if there is none; the same on all ranks."""
    found: list[str | None] = []
    Task(context, lambda: found.append(_fault(path, context.rank, context.world_size))).wait()
    everyone = cast(list[str | None], all_gather_object(context.world, found[0]))
    return next(filter(None, everyone), None)


def _newest_first(folder: Path) -> list[Path]:
    """The checkpoints whose manifest can be read, newest first; warns of the others."""
    reached, order = -1, dict[Path, tuple[int, int]]()
    for path, manifest in saved_in_order(folder, warn=True):
        step = reached if manifest.step is None else manifest.step
        reached, order[path] = max(reached, step), (step, manifest.sequence)
    return sorted(order, key=order.__getitem__, reverse=True)
