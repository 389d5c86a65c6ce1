"""Unconfirmed: a step of the optimizer that a rank has taken without waiting for the others, and the forwards that run
before all ranks have confirmed it. Must not contain: how weights are stepped.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor, nn

from pipeflow.parallel.context import Context
from pipeflow.parallel.transport.agreement import Gathering
from pipeflow.runtime.loss import AgreementRow, is_host
from pipeflow.runtime.stage import Stage
from pipeflow.tensor.recompute import replay_of


class Stepper(Protocol):
    """Steps the weights of a rank's stages within the engine's steps."""

    @property
    def may_run_ahead(self) -> bool:
        """Whether the next step may begin before the step just taken is confirmed. It is the same on all ranks."""

    def begin(self) -> None:
        """Call before a step. Raises UsageError if it cannot work now."""

    def step(self, stage: int) -> None:
        """Steps the weights of a stage, whose gradients are complete."""

    def norms(self) -> Tensor:
        """What other ranks must know of this rank's gradients to confirm the step: two numbers, float64."""

    def judge(self, norms: Tensor) -> bool:
        """Confirms the step, given the `norms` of every rank, [ranks, 2]. Returns False if the weights that it had
        before are no longer those of this step. Raises an error on all ranks if the gradients are not finite.
        """

    def undo(self) -> None:
        """Undoes the step, which is not confirmed."""


class Unconfirmed:
    """A step that this rank has taken. On a CPU the other ranks are told at once; a GPU is not waited for before
    `rows`.
    """

    def __init__(self, context: Context, told: AgreementRow, norms: Tensor) -> None:
        self._context = context
        self._told = told
        self._norms = norms
        self._gathering = self._begin() if is_host(context.device) else None
        self.stands: bool | None = None  # once it is known

    def _begin(self) -> Gathering:
        counted, elsewhere = self._norms.tolist()
        return Gathering(self._context.world, self._told._replace(counted=counted, elsewhere=elsewhere))

    def rows(self) -> list[AgreementRow]:
        """What every rank told, when all ranks have ended the step. Raises LinkError."""
        if self._gathering is None:
            self._gathering = self._begin()
        return [AgreementRow(*row) for row in self._gathering.end()]


class Repeatable:
    """The state of stages before forwards that may have to run again: their buffers, and the random generators."""

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
