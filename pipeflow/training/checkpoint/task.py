"""What ranks do together: a Task takes longer on some ranks than on others, such as reading and writing files."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch

from pipeflow.core.errors import UsageError
from pipeflow.engine.parallel.context import Context, context_if_launched
from pipeflow.engine.parallel.layout import WorldLayout
from pipeflow.engine.parallel.transport.agreement import all_gather, all_gather_object
from pipeflow.engine.parallel.transport.local import Hub, LocalTransport


def context_here() -> Context:
    """The context that `launch` set; without a launch, a world of one."""
    if (context := context_if_launched()) is not None:
        return context
    device = torch.device("cpu")
    return Context(0, WorldLayout(), device, LocalTransport(Hub(1), 0, device=device, timeout=60.0))


def require_same(context: Context, told: Mapping[str, object]) -> None:
    """Raises UsageError on all ranks unless all have passed the same arguments."""
    everyone: list[Any] = all_gather_object(context.world, dict(told))
    for name, first in everyone[0].items():
        for rank, one in enumerate(everyone):
            if one[name] != first:
                raise UsageError(
                    f"rank 0 passes the {name} {first!r} and rank {rank} {one[name]!r}: pass the same on all ranks, "
                    "since they write one copy together; nothing was saved"
                )


class Task:
    """Runs `work` on its own thread, which the interpreter waits for at exit. The thread waits until the GPU has done
    what was issued before; the caller goes on.
    """

    def __init__(self, context: Context, work: Callable[[], None]) -> None:
        self._context = context
        self._work = work
        self._error: Exception | None = None
        self._on_gpu = context.device.type == "cuda"
        self._before = torch.cuda.current_stream(context.device).record_event() if self._on_gpu else None
        self._thread = threading.Thread(target=self._run, name=f"{work.__qualname__} of rank {context.rank}")
        self._thread.start()

    def wait(self) -> None:
        """Waits until the work of every rank is done; all ranks call it together. They exchange messages meanwhile, so
        a slow rank causes no timeout. Raises the error of this rank's work, and LinkError.
        """
        pulse, everybody = min(1.0, self._context.world.timeout / 4), False
        while not everybody:
            self._thread.join(pulse)
            done = not self._thread.is_alive()
            if self._error is not None:
                raise self._error
            everybody = all(each for [each] in all_gather(self._context.world, [done]))

    def _run(self) -> None:
        try:
            with torch.cuda.device(self._context.device) if self._on_gpu else nullcontext():
                if self._before is not None:
                    self._before.synchronize()
                self._work()
                if self._on_gpu:
                    torch.cuda.current_stream().synchronize()
        except Exception as error:
            self._error = error
        del self._work  # and what it refers to
