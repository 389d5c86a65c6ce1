"""Pace: keeps the host at most one step ahead of its GPU. Must not contain: what a step computes."""

from __future__ import annotations

from functools import partial

import torch

from pipeflow.engine.parallel.transport.agreement import finish
from pipeflow.engine.parallel.transport.protocol import Exchange, Transport


class Pace:
    """At the end of a step, waits until the GPU has finished the step before. Meanwhile the GPU runs the current step.

    Nothing else in a step waits for the GPU. So this wait notices a GPU that waits for another one for ever. Like any
    wait for other ranks, it ends with an error on all ranks after the timeout.

    Args:
        world: the transport of all ranks.
    """

    def __init__(self, world: Transport) -> None:
        self._world = world
        self._event: torch.cuda.Event | None = None  # the end of the step before

    def step(self) -> None:
        """Call when a step has been issued. Raises LinkError."""
        world = self._world
        if world.device.type != "cuda":
            return
        before, self._event = self._event, torch.cuda.current_stream(world.device).record_event()
        if before is not None:
            following = world.link((world.rank + 1) % world.size)  # then the chain of who waits for whom has all ranks
            finish(Exchange(following, partial(_EventWait, before)), "waiting for its device")

    def forget(self) -> None:
        """Drops the step before, which may never end."""
        self._event = None


class _EventWait:
    """The wait until a GPU has come to an event."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def wait(self) -> bool:
        self._event.synchronize()
        return True
