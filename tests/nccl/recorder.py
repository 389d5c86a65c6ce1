"""Recorder: a transport between threads that records what each rank issues, in the order in which it does so, as NCCL
and a GPU would get it. The engine runs real steps on a pretended GPU; nothing is derived from schedules.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from threading import get_ident
from types import FrameType
from typing import Any

import torch
from torch import Tensor

import pipeflow
from pipeflow.engine.parallel.context import Context, current_context, set_context
from pipeflow.engine.parallel.transport.local import LocalTransport
from pipeflow.engine.parallel.transport.protocol import Channel, Group, Tag, Work, to_connect
from pipeflow.engine.parallel.transport.protocol import Start as Begin
from pipeflow.testing import run_threads
from tests.nccl.device import DEVICE, Watch, is_beside, pretended
from tests.nccl.replay import Communicator, Compute, Connect, Exchange, Issued, Start, Synchronize, Wait

_ROOT = f"{Path(pipeflow.__file__).parent}/"
_DEADLINE = 300.0  # seconds
_BETWEEN = (str(Path(__file__).parent), str(Path(torch.__file__).parent))  # files that only pass a question on


class Recorder(LocalTransport):
    """A LocalTransport that records. Its device is the pretended GPU.

    Attributes:
        log: what this rank has issued. Waits of other threads, as in a traced step, count as waits of the computations.
    """

    def __init__(self, plain: LocalTransport) -> None:
        super().__init__(plain.hub, plain.rank, timeout=plain.timeout)
        self.device = DEVICE
        self.log: list[Issued] = []
        self._numbers: Counter[Communicator] = Counter()
        self._groups: set[Communicator] = set()  # that are connected
        self._host = get_ident()

    def connect(self, channels: Iterable[Channel]) -> None:
        new = to_connect(channels, self._connected)
        self.log += [Connect(_communicator(*channel)) for channel in new]
        super().connect(new)

    def meet(self, group: Communicator) -> None:
        """Records that a group connects, the first time."""
        if group not in self._groups:
            self._groups.add(group)
            self.log.append(Connect(group))

    def sender(self, peer: int, tag: Tag) -> Begin:
        return self._recording(super().sender(peer, tag), _communicator(self.rank, peer, tag), tag)

    def receiver(self, peer: int, tag: Tag) -> Begin:
        return self._recording(super().receiver(peer, tag), _communicator(peer, self.rank, tag), tag)

    def group(self, ranks: Sequence[int], *, on_host: bool = False) -> Group:
        plain = super().group(ranks, on_host=on_host)
        channel = Communicator(tuple(ranks), "host" if on_host else "group")
        return _RecordedGroup(plain, self, channel, on_host) if len(ranks) > 1 else plain

    def _recording(self, begin: Begin, channel: Communicator, tag: Tag) -> Begin:
        def start(tensors: list[Tensor]) -> Work:
            return self.start(channel, tag.on_host, begin, tensors)

        return start

    def start(self, channel: Communicator, on_host: bool, begin: Callable[..., Work], *arguments: object) -> Work:
        """Starts a transfer or a collective, and records it."""
        exchange = Exchange(channel, self._numbers[channel])
        self._numbers[channel] += 1
        self.log.append(Start(exchange, on_host))
        return _RecordedWork(begin(*arguments), self, Wait(exchange, on_host))

    def wait(self, wait: Wait) -> None:
        """Records a wait, unless it holds up no more than a thread or a stream beside."""
        if get_ident() == self._host or not (wait.on_host or is_beside()):
            self.log.append(wait)

    def computed(self) -> None:
        """Records a computation; several in a row are one."""
        if not self.log or not isinstance(self.log[-1], Compute):
            self.log.append(Compute())

    def waited(self, why: str) -> None:
        """Records that the host waits for the device, and which line of pipeflow made it wait."""
        self.log.append(Synchronize(f"{_line()} {why}", everything=why == "synchronize"))


def _communicator(source: int, destination: int, tag: Tag) -> Communicator:
    return Communicator((source, destination), tag.name)


def _line() -> str:
    """The line that asked the device for a value: its file and number, or the file alone where it is not pipeflow's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_BETWEEN):
        frame = frame.f_back
    if frame is None:
        return ""
    file = frame.f_code.co_filename
    return f"{file.removeprefix(_ROOT)}:{frame.f_lineno}" if file.startswith(_ROOT) else Path(file).name


class _RecordedWork:
    def __init__(self, plain: Work, recorder: Recorder, end: Wait) -> None:
        self._plain, self._recorder, self._end = plain, recorder, end

    def wait(self) -> object:
        self._recorder.wait(self._end)
        return self._plain.wait()


class _RecordedGroup:
    """A group whose collectives are recorded."""

    def __init__(self, plain: Group, recorder: Recorder, communicator: Communicator, on_host: bool) -> None:
        self.rank, self.size = plain.rank, plain.size
        self._plain, self._recorder, self._communicator, self._on_host = plain, recorder, communicator, on_host

    def connect(self) -> None:
        if not self._on_host:
            self._recorder.meet(self._communicator)

    def __getattr__(self, name: str) -> Any:
        collective = getattr(self._plain, name)
        return lambda *arguments: self._recorder.start(self._communicator, self._on_host, collective, *arguments)


def recorded(function: Callable[..., object], ranks: int, *arguments: object, **layout: Any) -> list[list[Issued]]:
    """Calls `function(*arguments)` on every rank, with ranks as threads, and returns what each rank issued."""

    def run() -> list[Issued]:
        here = current_context()
        plain = here.world
        assert isinstance(plain, LocalTransport)
        recorder = Recorder(plain)
        recorded = Context(here.rank, here.layout, DEVICE, recorder, here.context_attention)
        set_context(recorded)
        try:
            with Watch(recorder.computed, recorder.waited):
                function(*arguments)
        finally:
            recorded.close()  # or threads of later tests would be taken for ranks without a context
        return recorder.log

    with pretended():
        return run_threads(run, ranks, **layout, deadline=_DEADLINE, timeout=_DEADLINE)
