"""Repeatable: the state of stages before forwards that may have to run again. Must not contain: when they do."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from pipeflow.engine.runtime.stage import Stage
from pipeflow.engine.tensor.random import replay_of


class Repeatable:
    """The state of stages at this moment: what their forwards may change, and the random generators."""

    def __init__(self, stages: Iterable[Stage], device: torch.device) -> None:
        self._stages = list(stages)
        self._replayed = replay_of("a stage of this rank", device)
        self._states = [stage.state.now() for stage in self._stages]

    def ran(self) -> None:
        """Call after the forwards."""
        for stage in self._stages:
            stage.state.ran()

    @contextmanager
    def again(self) -> Iterator[None]:
        """A region in which the forwards run again from that state."""
        for stage, state in zip(self._stages, self._states, strict=True):
            state.restore()
            if stage.deferral.copies is not None:
                stage.deferral.copies.clear()  # of other weights
        with self._replayed():
            yield
