"""StepTrace: measures a step as a Timeline. A traced step wraps its computations; an untraced step has no overhead."""

from __future__ import annotations

import socket
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import replace
from operator import attrgetter
from threading import Thread
from typing import Any

import torch

from pipeflow.core.action import Kind
from pipeflow.core.dataflow import DATAFLOW, Stream
from pipeflow.core.schedule import Schedule
from pipeflow.core.timeline import Span, Timeline
from pipeflow.engine.parallel.transport.agreement import all_gather, all_gather_object
from pipeflow.engine.parallel.transport.protocol import Transport, Work
from pipeflow.engine.runtime.program.operations import Await, Beside, ComputeOperation, Operation
from pipeflow.engine.runtime.program.pairs import Both

Moment = float | torch.cuda.Event
"""A time of the CPU's clock, or an event in a GPU's stream, whose time is known once the GPU has come to it."""


def _now(on_gpu: bool) -> Moment:
    """This moment; on a GPU, the moment when what was issued to the current stream so far is done."""
    if not on_gpu:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


class TimedCompute(ComputeOperation):
    """A computation that records its start and end: by the clock on a CPU, by events on a GPU, whose computations
    continue after the call.
    """

    __slots__ = ("compute", "end", "on_gpu", "start")

    def __init__(self, compute: ComputeOperation, *, on_gpu: bool) -> None:
        super().__init__(compute.action)
        self.compute = compute
        self.on_gpu = on_gpu
        self.start: Moment = 0.0
        self.end: Moment = 0.0

    def __call__(self) -> None:
        self.start = _now(self.on_gpu)
        self.compute()
        self.end = _now(self.on_gpu)


class TimedBeside(Operation):
    """An operation beside the computations that records its start and the end of the work it started, for which a
    thread waits: on a GPU on a stream of its own, since the computations must not wait.
    """

    __slots__ = ("beside", "device", "end", "start", "thread")

    def __init__(self, beside: Beside, device: torch.device) -> None:
        self.beside = beside
        self.device = device
        self.start: Moment = 0.0
        self.end: Moment = 0.0
        self.thread: Thread | None = None

    def __call__(self) -> None:
        self.start = _now(self.device.type == "cuda")
        self.beside()
        self.thread = Thread(target=self._wait, args=(self.beside.works,), daemon=True)
        self.thread.start()

    def _wait(self, works: list[Work]) -> None:
        on_gpu = self.device.type == "cuda"
        with torch.cuda.stream(torch.cuda.Stream(self.device)) if on_gpu else nullcontext():
            with suppress(Exception):
                for work in works:  # the step waits for the same work and raises its error
                    work.wait()
            self.end = _now(on_gpu)


class StepTrace:
    """The measurement of one step on one rank; all ranks make theirs together."""

    def __init__(self, operations: list[Operation], transport: Transport) -> None:
        on_gpu = transport.device.type == "cuda"
        self.transport = transport
        self.operations = [_timed(operation, transport.device) for operation in operations]
        if on_gpu:
            torch.cuda.synchronize(transport.device)
        all_gather(transport, [0.0])
        self.zero = time.perf_counter()
        self.event = (
            torch.cuda.current_stream(transport.device).record_event(torch.cuda.Event(enable_timing=True))
            if on_gpu
            else None
        )

    def timeline(self, schedule: Schedule, writing: Callable[[int], float]) -> Timeline:
        """The spans of every rank in seconds since rank 0 started the step; the same on every rank. `writing`
        returns the seconds in which the sums of a stage were written into its gradients at the end of the step. The
        reduction includes this time, since its result cannot be used before.

        Ranks on rank 0's machine share its clock; ranks on other machines count from the moment at which all ranks
        started.
        """
        beside = [operation for operation in self.operations if isinstance(operation, TimedBeside)]
        for one in beside:
            if one.thread is not None:
                one.thread.join()
        if self.event is not None:
            torch.cuda.synchronize(self.transport.device)
        spans = self._spans() + self._spans_beside(beside, writing)
        host, mine = socket.gethostname(), sorted(spans, key=attrgetter("start"))
        everyone: list[Any] = all_gather_object(self.transport, (host, self.zero, mine))
        first_host, first_zero, _ = everyone[0]
        shifts = [zero - first_zero if of == first_host else 0.0 for of, zero, _ in everyone]
        rows = [_shifted(spans, shift) for (_, _, spans), shift in zip(everyone, shifts, strict=True)]
        return Timeline(schedule.name, schedule.placement, tuple(rows), unit="s")

    def _spans_beside(self, timed: list[TimedBeside], writing: Callable[[int], float]) -> list[Span]:
        spans: list[Span] = []
        free: defaultdict[Stream, float] = defaultdict(float)
        ends: dict[Beside, float] = {}
        for one in timed:  # one after the other, as in a simulation, although they may overlap in time
            action = one.beside.action
            stream = DATAFLOW[action.kind].stream
            before = (ends[each] for each in one.beside.after)
            start, end = max(self._since(one.start), free[stream], *before), self._since(one.end)
            free[stream] = max(start, end) + (writing(action.stage) if action.kind is Kind.R else 0.0)
            ends[one.beside] = free[stream]
            spans.append(Span(action, self.transport.rank, start, free[stream]))
        return spans

    def _spans(self) -> list[Span]:
        timed = [operation for operation in self.operations if isinstance(operation, TimedCompute)]
        rank = self.transport.rank
        return [
            span for one in timed for span in _spans(one.compute, rank, self._since(one.start), self._since(one.end))
        ]

    def _since(self, moment: Moment) -> float:
        if isinstance(moment, float):
            return moment - self.zero
        assert self.event is not None
        milliseconds: float = self.event.elapsed_time(moment)
        return milliseconds / 1000


def _timed(operation: Operation, device: torch.device) -> Operation:
    match operation:
        case Await():
            return operation
        case ComputeOperation():
            return TimedCompute(operation, on_gpu=device.type == "cuda")
        case Beside():
            return TimedBeside(operation, device)
        case _:
            return operation


def _spans(compute: ComputeOperation, rank: int, start: float, end: float) -> list[Span]:
    """One span, or two for a pair: its halves cannot be told apart, so each gets half of the time."""
    if not isinstance(compute, Both):
        return [Span(compute.action, rank, start, end)]
    forward, backward, middle = compute.forward.action, compute.backward.action, (start + end) / 2
    return [Span(forward, rank, start, middle, backward), Span(backward, rank, middle, end, forward)]


def _shifted(spans: list[Span], by: float) -> tuple[Span, ...]:
    return tuple(replace(span, start=span.start + by, end=span.end + by) for span in spans)
