"""Repeatable: the state of stages before forwards that may have to run again. Must not contain: when they do."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from pipeflow.runtime.stage import Stage
from pipeflow.tensor.recompute import replay_of


class Repeatable:
    """The state of stages at this moment: their buffers, and the random generators."""

    def __init__(self, stages: Iterable[Stage], device: torch.device) -> None:
        self._stages = list(stages)
        self._replayed = replay_of("a stage of this rank", device)
        self._buffers = [_Kept(layer, name) for layer, name in _buffers_of(self._stages)]

    @contextmanager
    def again(self) -> Iterator[None]:
        """A region in which the forwards run again from that state."""
        for each in self._buffers:
            each.restore()
        for stage in self._stages:
            if stage.deferral.copies is not None:
                stage.deferral.copies.clear()  # of other weights
        with self._replayed():
            yield


class _Kept:
    """A buffer with the values that it had."""

    def __init__(self, layer: nn.Module, name: str) -> None:
        self._buffers, self._name = layer._buffers, name
        self._buffer = layer._buffers[name]
        self._values = None if self._buffer is None else self._buffer.detach().clone()

    @torch.no_grad()
    def restore(self) -> None:
        self._buffers[self._name] = self._buffer
        if self._buffer is not None and self._values is not None:
            self._buffer.copy_(self._values)


def _buffers_of(stages: Iterable[Stage]) -> Iterator[tuple[nn.Module, str]]:
    for stage in stages:
        for layer in stage.module.modules():
            yield from ((layer, name) for name in layer._buffers)
