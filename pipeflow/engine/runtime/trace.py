"""StepTrace: measures a step as a Timeline. A traced step wraps its computations; an untraced step has no overhead."""

from __future__ import annotations

import socket
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from operator import attrgetter
from threading import Thread
from typing import Any

import torch

from pipeflow.core.action import Action, Pair
from pipeflow.core.dataflow import DATAFLOW, Stream
from pipeflow.core.schedule import Schedule
from pipeflow.core.slices import shares_of
from pipeflow.core.timeline import Span, Timeline
from pipeflow.engine.parallel.transport.agreement import all_gather, all_gather_object
from pipeflow.engine.parallel.transport.protocol import Transport, Work
from pipeflow.engine.parallel.turns import Turns
from pipeflow.engine.runtime.program.operations import Beside, Doing, Operation

Moment = float | torch.cuda.Event
"""A time of the CPU's clock, or an event in a GPU's stream, whose time is known once the GPU has come to it."""


def _now(on_gpu: bool) -> Moment:
    """This moment; on a GPU, the moment when what was issued to the current stream so far is done."""
    if not on_gpu:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


class Timed:
    """A call that records its start and end: by the clock on a CPU, by events on a GPU, whose computations continue
    after the call.
    """

    def __init__(self, operation: Operation, device: torch.device, turns: Turns) -> None:
        self.operation, self.turns = operation, turns
        self.waited = 0.0  # seconds in which the host waited for tokens of experts
        self.device, self.on_gpu = device, device.type == "cuda"
        self.start: Moment = 0.0
        self.end: Moment = 0.0
        self.thread: Thread | None = None

    def __call__(self) -> None:
        self.start, waited = _now(self.on_gpu), self.turns.waited
        self.operation.call()
        self.waited = self.turns.waited - waited
        if isinstance(self.operation.by, Beside):
            self.thread = Thread(target=self._wait, args=(self.operation.by.works,), daemon=True)
            self.thread.start()
        else:
            self.end = _now(self.on_gpu)

    def _wait(self, works: list[Work]) -> None:
        """Records when the work that was started beside the computations ends. On a GPU it does so on a stream of its
        own, since the computations must not wait.
        """
        with torch.cuda.stream(torch.cuda.Stream(self.device)) if self.on_gpu else nullcontext():
            with suppress(Exception):
                for work in works:  # the step waits for the same work and raises its error
                    work.wait()
            self.end = _now(self.on_gpu)


class StepTrace:
    """The measurement of one step on one rank; all ranks make theirs together. `turns` are those of this rank."""

    def __init__(self, operations: list[Operation], transport: Transport, turns: Turns) -> None:
        on_gpu = transport.device.type == "cuda"
        self.transport = transport
        self.operations, self.timed = list[Operation](), list[Timed]()
        for operation in operations:
            if operation.doing in (Doing.COMPUTE, Doing.BEGIN):
                self.timed.append(timed := Timed(operation, transport.device, turns))
                operation = operation._replace(call=timed)
            self.operations.append(operation)
        if on_gpu:
            torch.cuda.synchronize(transport.device)
        all_gather(transport, [0.0])
        self.zero = time.perf_counter()
        self.event = (
            torch.cuda.current_stream(transport.device).record_event(torch.cuda.Event(enable_timing=True))
            if on_gpu
            else None
        )

    def timeline(self, schedule: Schedule, cuts: Sequence[Sequence[int]] = ()) -> Timeline:
        """The spans of every rank in seconds since rank 0 started the step; the same on every rank. `cuts` has the ends
        of the slices of each microbatch, in tokens.

        Ranks on rank 0's machine share its clock; ranks on other machines count from the moment at which all ranks
        started.
        """
        for one in self.timed:
            if one.thread is not None:
                one.thread.join()
        if self.event is not None:
            torch.cuda.synchronize(self.transport.device)
        spans = [*self._spans(), *self._spans_beside()]
        host, mine = socket.gethostname(), sorted(spans, key=attrgetter("start"))
        everyone: list[Any] = all_gather_object(self.transport, (host, self.zero, mine))
        first_host, first_zero, _ = everyone[0]
        shifts = [zero - first_zero if of == first_host else 0.0 for of, zero, _ in everyone]
        rows = [
            tuple([replace(span, start=span.start + shift, end=span.end + shift) for span in spans])
            for (_, _, spans), shift in zip(everyone, shifts, strict=True)
        ]
        ends = [sum(column) for column in zip(*cuts, strict=True)]  # of slices of a mean microbatch
        lengths = shares_of(ends, 0.0) if ends else ()
        return Timeline(schedule.name, schedule.placement, tuple(rows), unit="s", slice_lengths=lengths)

    def _spans_beside(self) -> Iterator[Span]:
        free: defaultdict[Stream, float] = defaultdict(float)
        ends: dict[Beside, float] = {}
        for one in self.timed:  # one after the other, as in a simulation, although they may overlap in time
            if isinstance(beside := one.operation.by, Beside):
                action, stream = beside.action, DATAFLOW[beside.action.kind].stream
                before = (ends[each] for each in beside.after)
                start, end = max(self._since(one.start), free[stream], *before), self._since(one.end)
                ends[beside] = free[stream] = max(start, end)
                yield Span(action, self.transport.rank, start, free[stream])

    def _spans(self) -> Iterator[Span]:
        """One for each computation. The halves of a pair cannot be told apart, so each gets half of the time. On a GPU,
        nobody knows how long it waits for tokens of experts.
        """
        rank = self.transport.rank
        for one in self.timed:
            start, end = self._since(one.start), self._since(one.end)
            waited = 0.0 if one.on_gpu else one.waited
            match one.operation:
                case Operation(by=Pair(forward, backward)):
                    middle = (start + end) / 2
                    yield Span(forward, rank, start, middle, backward, waited / 2)
                    yield Span(backward, rank, middle, end, forward, waited / 2)
                case Operation(doing=Doing.COMPUTE, what=Action() as action):
                    yield Span(action, rank, start, end, None, waited)

    def _since(self, moment: Moment) -> float:
        if isinstance(moment, float):
            return moment - self.zero
        assert self.event is not None
        milliseconds: float = self.event.elapsed_time(moment)
        return milliseconds / 1000
