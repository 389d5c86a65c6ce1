"""Runs a script whose steps are recorded: `python -m pipeflow.checking.scripted SCRIPT ...`, which `scripts` calls."""

from __future__ import annotations

import json
import os
import runpy
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from threading import Thread
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

import pipeflow
from pipeflow import schedules
from pipeflow.checking.recorder import Recording, shares_dropped
from pipeflow.checking.scripts import RAISED, VARIABLE, Changes
from pipeflow.checking.watching import TRIALS
from pipeflow.engine.parallel import launcher
from pipeflow.engine.runtime import pipeline as pipeline_module
from pipeflow.schedules import registry


def trained_around(module: nn.Module) -> Sequence[nn.Module]:
    """The modules that are trained where `module` is called: the outermost one with it inside that calls it, or all
    stages of torch's pipelining on this rank. Empty if it is not trained here, or a Pipeline runs or traces it.
    """
    if not module.training or not any(each.requires_grad for each in module.parameters()):
        return []
    if any(isinstance(getattr(type(each), "pipeline", None), property) for each in module.modules()):
        return []  # a wrapper that trains a Pipeline
    found: Sequence[nn.Module] = [module]
    for frame in _frames():
        if str(frame.f_globals.get("__name__")).startswith("pipeflow.") or frame.f_code.co_name in TRIALS:
            return []
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and any(each is found[0] for each in owner.modules()):
            found = [owner]
        elif stages := _stages_of(owner):
            found = stages
    return found


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _stages_of(owner: Any) -> list[nn.Module]:
    """The stages that a schedule of torch's pipelining runs on this rank."""
    if "torch.distributed.pipelining.schedules" not in {each.__module__ for each in type(owner).__mro__}:
        return []
    stages = owner._stages if hasattr(owner, "_stages") else [owner._stage]
    return [stage.submod for stage in stages]


class RecordedCalls:
    """Takes the places of pipeflow's functions that a script calls.

    Args:
        changes: what to do otherwise than the script says.
    """

    def __init__(self, changes: Changes) -> None:
        self.changes = changes
        self.recording: Recording | None = None
        self.initializes = False  # a call that gives lazy modules their shapes, which is no step
        self._launch, self._make, self._execute = (
            launcher.launch,
            registry.make_schedule,
            pipeline_module.execute_pipeline,
        )
        self._call = nn.Module.__call__

    def install(self) -> None:
        """Lets modules that are imported from now on find these functions."""
        places: dict[str, tuple[object, Callable[..., Any]]] = {
            "launch": (self._launch, self.launch),
            "make_schedule": (self._make, self.make_schedule),
            "execute_pipeline": (self._execute, self.execute),
        }
        for name, (original, function) in places.items():
            for owner in (pipeflow, launcher, registry, schedules, pipeline_module):
                if owner is pipeflow or getattr(owner, name, None) is original:
                    setattr(owner, name, function)
        recorded = self

        def call(module: nn.Module, *arguments: Any, **named: Any) -> Any:
            if recorded.initializes or not torch.is_grad_enabled() or not (models := trained_around(module)):
                return recorded._call(module, *arguments, **named)
            recorded.initializes = any(map(is_lazy, (each for model in models for each in model.parameters())))
            if not recorded.initializes:
                recorded.step_begins(models)
            try:
                return recorded._call(module, *arguments, **named)
            finally:
                recorded.initializes = False

        nn.Module.__call__ = call  # type: ignore[method-assign]  # hooks of modules come too late to add others

    def launch(self, pipeline: int | None = None, tensor: int = 1, **named: Any) -> Any:
        """One rank, or other tensor ranks than the script says."""
        if self.changes.plain:
            pipeline, tensor = 1, 1
        elif self.changes.tensor is not None:
            pipeline, tensor = None, self.changes.tensor
        return self._launch(pipeline, tensor, **named)

    def make_schedule(self, name: str, *, ranks: int, microbatches: int, **options: Any) -> Any:
        """A schedule of one rank, or another one than the script says."""
        if self.changes.plain:
            return self._make("gpipe", ranks=1, microbatches=microbatches)
        if self.changes.schedule is not None:
            name, options = self.changes.schedule, {}
        return self._make(name, ranks=ranks, microbatches=microbatches, **options)

    def execute(self, data_iter: Any, model: Any, **named: Any) -> Any:
        """A step of a Pipeline."""
        if not named.get("forward_only"):
            self.step_begins([model])
        return self._execute(data_iter, model, **named)

    def step_begins(self, models: Sequence[nn.Module]) -> None:
        """Starts to record before the first call that trains, and ends the recording at the first after its last step.
        The script goes on, since other ranks may wait for this one before they come as far.
        """
        if self.recording is None:
            for model in models:
                drop_nothing(model)
            self.recording = Recording(self.changes.folder, models, whole=self.changes.whole)
            self.recording.__enter__()
        elif self.recording.done >= self.changes.steps:
            self.recording.end()

    def end(self) -> None:
        """Closes the recording, if one has begun."""
        if self.recording is not None:
            self.recording.__exit__(None, None, None)


def drop_nothing(model: nn.Module) -> None:
    """Switches dropout off: ranks and microbatches would drop other values than one process."""
    for module in model.modules():
        for name in [*shares_dropped(module)]:
            setattr(module, name, 0.0)


def main() -> None:
    """Runs the script that the arguments name."""
    changes = Changes(**json.loads(os.environ[VARIABLE]))
    if changes.lives is not None:
        Thread(target=_end_with, args=(changes.lives,), daemon=True).start()
    recorded = RecordedCalls(changes)
    recorded.install()
    sys.argv = sys.argv[1:]
    sys.path.insert(0, os.path.dirname(os.path.abspath(sys.argv[0])))
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except BaseException as error:
        if not isinstance(error, SystemExit) or error.code:
            os.write(2, f"\n{RAISED}{time.monotonic()}\n".encode())
            raise
    recorded.end()
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()  # whose threads would abort the process as it ends


def _end_with(pipe: int) -> None:
    """Ends this process, and those that it started, when the process that has the other end of a pipe ends."""
    os.read(pipe, 1)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
