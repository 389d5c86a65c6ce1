"""Compile: from a rank's program to the list of operations that a step calls, one after the other."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from pipeflow.core.action import Action, Kind, Pair
from pipeflow.core.dataflow import Content, Value
from pipeflow.core.program import Compute, Instruction, Program, Recv, Release, Send
from pipeflow.core.schedule import Schedule
from pipeflow.parallel.transport.protocol import Lane, Transport
from pipeflow.runtime.gradients.fully_sharded import Averaging, fully_sharded_in
from pipeflow.runtime.gradients.step_end import Gradients
from pipeflow.runtime.program import operations as ops
from pipeflow.runtime.program import transfers
from pipeflow.runtime.program.cells import Cell, Meta, Results, Saved
from pipeflow.runtime.program.described import Arrival, Lanes, PostDescribed, SendDescribed, WaitDescribed
from pipeflow.runtime.program.pairs import Both, Half, Overlap
from pipeflow.runtime.stage import Stage


@dataclass(slots=True)
class Compiled:
    """A program ready to run. What a step brings (its batch) is put into the lists that the operations hold."""

    operations: list[ops.Operation]
    results: Results
    positionals: list[tuple[object, ...]]  # per microbatch, what the first stage gets


def compile_program(
    program: Program,
    *,
    schedule: Schedule,
    stages: Mapping[int, Stage],
    transport: Transport,
    meta: Meta | None,
    training: bool,
    overlap: Overlap | None,
    gradients: Gradients,
    reduce: bool,
) -> Compiled:
    """The operations of `program` on this rank.

    Args:
        program: this rank's.
        schedule: what it was lowered from.
        stages: those this rank holds, by index.
        transport: makes the channels.
        meta: what activations between ranks look like; None when headers are to tell.
        training: whether forwards keep what backwards need.
        overlap: runs pairs; without it there must be none.
        gradients: of all stages, to be reduced.
        reduce: whether they are averaged over replicas.
    """
    num_stages, num_microbatches = schedule.placement.num_stages, schedule.num_microbatches
    compiler = _Compiler(stages, num_stages, transport, meta, training, overlap, gradients, num_microbatches)
    operations = [operation for instruction in program.instructions for operation in compiler.lower(instruction)]
    if training:
        operations = _averaged(operations, stages, reduce)
    return Compiled(operations, compiler.results, compiler.positionals)


def _averaged(operations: list[ops.Operation], stages: Mapping[int, Stage], reduce: bool) -> list[ops.Operation]:
    """With what stages under fully_shard are told: to average in their last backward, or not at all."""
    for index, stage in stages.items():
        if sharded := fully_sharded_in(stage.module):
            operations = [Averaging(sharded, now=False), *operations]
            if reduce:
                last = max(position for position, each in enumerate(operations) if _is_backward_of(index, each))
                operations.insert(last, Averaging(sharded, now=True))
    return operations


def _is_backward_of(stage: int, operation: ops.Operation) -> bool:
    backward = operation.backward if isinstance(operation, Both) else operation
    return isinstance(backward, ops.Backward | Half) and backward.action.stage == stage


@dataclass(slots=True)
class _Compiler:
    stages: Mapping[int, Stage]
    num_stages: int
    transport: Transport
    meta: Meta | None
    training: bool
    overlap: Overlap | None
    gradients: Gradients
    num_microbatches: int
    results: Results = field(init=False)
    positionals: list[tuple[object, ...]] = field(init=False)
    cells: dict[Value, Cell] = field(default_factory=dict)
    saved: dict[tuple[int, int], Saved] = field(default_factory=dict)
    sends: dict[Value, transfers.Described] = field(default_factory=dict)
    waits: dict[Value, ops.Operation] = field(default_factory=dict)
    inboxes: dict[int, deque[Arrival]] = field(default_factory=lambda: defaultdict(deque))

    def __post_init__(self) -> None:
        self.results = Results(self.num_microbatches)
        self.positionals = [()] * self.num_microbatches

    def lower(self, instruction: Instruction) -> list[ops.Operation]:
        match instruction:
            case Recv(value, peer):
                return [self.post(value, peer)]
            case Compute(entry):
                return self.both(entry) if isinstance(entry, Pair) else self.compute(entry)
            case Send(value, peer):
                return [self.send(value, peer)]
            case Release(value, peer):
                return [transfers.Release(value, peer, self.cells[value])]

    def post(self, value: Value, peer: int) -> ops.Operation:
        cell = self.cells[value] = Cell(() if self.meta is None else self.meta.grads)
        device = self.transport.device
        self.waits[value] = transfers.Wait(value, peer, cell)
        if value.content is Content.GRADIENT:
            start = self.transport.receiver(peer, Lane.GRADIENT)
            sent = self.sends[Value(Content.ACTIVATION, value.stage - 1, value.microbatch)]
            return transfers.PostGradient(value, peer, cell, start, sent, device)
        if self.meta is not None:
            start = self.transport.receiver(peer, Lane.ACTIVATION)
            return transfers.Post(value, peer, cell, start, self.meta, device)
        arrival = Arrival(cell, Lanes.receiving(self.transport, peer), device)
        self.waits[value] = WaitDescribed(value, peer, arrival, self.inboxes[peer])
        return PostDescribed(value, peer, arrival, self.inboxes[peer])

    def send(self, value: Value, peer: int) -> ops.Operation:
        cell = self.cells[value]
        if value.content is Content.GRADIENT:
            return transfers.SendGradient(value, peer, cell, self.transport.sender(peer, Lane.GRADIENT))
        if self.meta is None:
            described = SendDescribed(value, peer, cell, Lanes.sending(self.transport, peer))
            self.sends[value] = described
            return described
        send = transfers.Send(value, peer, cell, self.transport.sender(peer, Lane.ACTIVATION), self.meta)
        self.sends[value] = send
        return send

    def compute(self, action: Action) -> list[ops.Operation]:
        match action.kind:
            case Kind.F:
                return self.forward(action)
            case Kind.B | Kind.I:
                return self.backward(action)
            case Kind.W:
                return [ops.BackwardWeight(action, self.saved[action.stage, action.microbatch])]
            case Kind.R:
                return [ops.Reduce(action, self.gradients.reduce)]

    def both(self, pair: Pair) -> list[ops.Operation]:
        """Both halves' inputs first, then the halves."""
        *before, forward = self.forward(pair.forward)
        *also, backward = self.backward(pair.backward)
        assert isinstance(forward, ops.Forward)
        assert isinstance(backward, ops.Backward)
        assert self.overlap is not None
        return [*before, *also, Both(forward, backward, self.overlap, self.stages[pair.backward.stage].module)]

    def forward(self, action: Action) -> list[ops.Operation]:
        stage, microbatch = action.stage, action.microbatch
        saved = self.saved.setdefault((stage, microbatch), Saved()) if self.training else None
        before: list[ops.Operation] = []
        source: Callable[[], tuple[object, ...]] = ops.FromBatch(self.positionals, microbatch)
        if stage > 0:
            value = Value(Content.ACTIVATION, stage - 1, microbatch)
            before = self.awaited(value)
            source = ops.FromCell(self.cells[value], saved)
        sink: Callable[[object], None] = ops.ToResults(self.results, microbatch, saved)
        if stage < self.num_stages - 1:
            sink = ops.ToCell(self.cell(Value(Content.ACTIVATION, stage, microbatch)), saved)
        return [*before, ops.Forward(action, self.stages[stage], source, sink)]

    def backward(self, action: Action) -> list[ops.Operation]:
        stage, microbatch = action.stage, action.microbatch
        before: list[ops.Operation] = []
        source: Callable[[], list[torch.Tensor]] = ops.LossGradient(self.results, microbatch)
        if stage < self.num_stages - 1:
            value = Value(Content.GRADIENT, stage + 1, microbatch)
            before = self.awaited(value)
            source = ops.CellGradients(self.cells[value])
        sink = self.cell(Value(Content.GRADIENT, stage, microbatch)) if stage > 0 else None
        saved = self.saved[stage, microbatch]
        if action.kind is Kind.I:
            return [*before, ops.BackwardInput(action, saved, source, sink, self.stages[stage].deferral)]
        return [*before, ops.Backward(action, saved, source, sink)]

    def cell(self, value: Value) -> Cell:
        """The cell of a value that is made on this rank."""
        return self.cells.setdefault(value, Cell())

    def awaited(self, value: Value) -> list[ops.Operation]:
        """The wait for a value from another rank; nothing for one that was made here."""
        return [self.waits[value]] if value in self.waits else []
