"""Compile: turns a rank's program into the list of operations that a step calls one after the other."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from pipeflow.core.action import Action, Kind, Pair
from pipeflow.core.dataflow import DATAFLOW, Content, Value, makes, needs
from pipeflow.core.program import Compute, Instruction, Program, Recv, Release, Send
from pipeflow.core.route import Routes
from pipeflow.core.rows import first_uses
from pipeflow.core.schedule import Schedule
from pipeflow.engine.parallel.transport.protocol import Channel, Tag, Transport
from pipeflow.engine.runtime.gradients.fully_sharded import Averaging, fully_sharded_in
from pipeflow.engine.runtime.gradients.step_end import Gradients
from pipeflow.engine.runtime.program import operations as ops
from pipeflow.engine.runtime.program import transfers
from pipeflow.engine.runtime.program.actions import OPERATIONS, Shared
from pipeflow.engine.runtime.program.ahead import Ahead, runs_ahead, split_ahead
from pipeflow.engine.runtime.program.dynamic_shapes import (
    Arrival,
    DynamicChannels,
    PostDynamic,
    SendDynamic,
    WaitDynamic,
)
from pipeflow.engine.runtime.program.host_memory import HostMemory
from pipeflow.engine.runtime.program.pairs import Both, Half, Overlap
from pipeflow.engine.runtime.program.payload import Payload, Promise
from pipeflow.engine.runtime.program.results import Results
from pipeflow.engine.runtime.stage import Stage

# Theory of operation
#
# A step must not decide anything: all that is known before it is put into the operations. So the program is walked
# once, and each instruction becomes an object that holds what it needs: its stage, its channel and its payload. A
# `Payload` is the place of one value in this rank's memory. The operation that makes the value and those that use it
# are compiled with the same payload, so a step passes nothing from one to the next.
#
# `waits` has, per received value, the operation that ends its receive; the action that first uses the value takes it.
# An action beside the computations (a reduction or a copy) is only started where it stands. Its consumer waits for
# it: a computation gets an `Await` before it, an action on a third stream gets it in `after`, and the end of the step
# awaits all of them. Gradients are sent with the shape of the activation that they answer, so a receive of a gradient
# looks up what was sent.


@dataclass(slots=True)
class Compiled:
    """A program that is ready to run. A step puts its batch into the lists that the operations hold. The last
    operations, from `closing` on, step the optimizer.
    """

    operations: list[ops.Operation]
    closing: int
    ahead: Ahead | None  # if there are any of these
    results: Results
    positionals: list[tuple[object, ...]]  # arguments of the first stage, by microbatch
    promise: Promise | None
    promised: list[transfers.PostActivation | transfers.SendActivation]  # the transfers that rely on it
    sizes: list[int] = field(default_factory=list)  # samples per microbatch for which they are prepared

    def fit(self, sizes: list[int]) -> None:
        """Prepares the transfers for microbatches of `sizes` samples, which are the same on all ranks."""
        if self.promise is not None and sizes != self.sizes:
            for transfer in self.promised:
                transfer.expect(self.promise.of(sizes[transfer.value.microbatch]))
            self.sizes = sizes


def compile_program(
    program: Program,
    *,
    schedule: Schedule,
    routes: Routes,
    stages: Mapping[int, Stage],
    transport: Transport,
    host: HostMemory,
    promise: Promise | None,
    training: bool,
    overlap: Overlap | None,
    gradients: Gradients,
    reduce: bool,
    step: Callable[[int], None],
) -> Compiled:
    """The operations of `program` on this rank.

    Args:
        program: program of this rank.
        schedule, routes: the schedule and routes from which it was lowered.
        stages: stages of this rank, by index.
        transport: transport that makes the channels.
        host: memory that takes what is offloaded.
        promise: shape and dtype of activations between ranks; None to send them in headers.
        training: True if forwards keep what backwards need.
        overlap: function that runs pairs; without it the schedule must have none.
        gradients: gradients of all stages, for reductions.
        reduce: True to average gradients over the replicas.
        step: function that steps the optimizer for a stage.
    """
    num_stages, num_microbatches = schedule.placement.num_stages, schedule.num_microbatches
    results = Results(num_microbatches)
    positionals: list[tuple[object, ...]] = [()] * num_microbatches
    inputs = (action for action in schedule.actions(program.rank) if action.kind is Kind.I)
    deferring = frozenset((action.stage, action.microbatch) for action in inputs)
    shared = Shared(
        stages, num_stages, transport.device, host, training, gradients, step, results, positionals, routes, deferring
    )
    if training:
        shared.remember(schedule.actions(program.rank))
    compiler = _Compiler(shared, transport, promise is not None, overlap, first_uses(schedule.actions(program.rank)))
    operations, first = compiler.program(program.instructions)
    if training:
        begins, operations = _averaged(operations, stages, reduce)
        operations, first = [*begins, *operations], len(begins) + first
    steps = [each for each in operations if isinstance(each, ops.StepWeights)]
    ahead = None
    if steps:
        operations, ahead = split_ahead(operations, first, schedule, routes)
    promised = [each for each in operations if isinstance(each, transfers.PostActivation | transfers.SendActivation)]
    operations = [*(each for each in operations if not isinstance(each, ops.StepWeights)), *steps]
    return Compiled(operations, len(operations) - len(steps), ahead, results, positionals, promise, promised)


def channels_of(program: Program, rank: int, *, known: bool) -> Iterator[Channel]:
    """The channels of this rank's program, to be connected before it is compiled. `known` is True if shapes of
    activations are known.
    """
    for instruction in program.instructions:
        match instruction:
            case Send(value, peer):
                source, destination = rank, peer
            case Recv(value, peer):
                source, destination = peer, rank
            case _:
                continue
        if value.content is Content.GRADIENT:
            yield Channel(source, destination, Tag.GRADIENT)
        elif known:
            yield Channel(source, destination, Tag.ACTIVATION)
        else:
            yield from DynamicChannels.between(source, destination)


def _averaged(
    operations: Sequence[ops.Operation], stages: Mapping[int, Stage], reduce: bool
) -> tuple[list[ops.Operation], list[ops.Operation]]:
    """The operations that begin a step of stages under fully_shard, and `operations` with those that make these stages
    average in their last backward.
    """
    begins, found = list[ops.Operation](), list(operations)
    for index, stage in stages.items():
        if sharded := fully_sharded_in(stage.module):
            begins.append(Averaging(sharded, now=False))
            if reduce:
                last = max(position for position, each in enumerate(found) if _is_backward_of(index, each))
                found.insert(last, Averaging(sharded, now=True))
    return begins, found


def _is_backward_of(stage: int, operation: ops.Operation) -> bool:
    backward = operation.backward if isinstance(operation, Both) else operation
    return isinstance(backward, ops.Backward | Half) and backward.action.stage == stage


@dataclass(slots=True)
class _Compiler:
    shared: Shared
    transport: Transport
    known: bool  # True if shapes of activations are known
    overlap: Overlap | None
    lasting: Mapping[Action, Value]  # whole weights, by the action that waits for them
    sends: dict[Value, transfers.SentActivation] = field(default_factory=dict)
    inboxes: dict[int, deque[Arrival]] = field(default_factory=lambda: defaultdict(deque))
    begun: dict[Value, ops.Beside] = field(default_factory=dict)  # by the value that they make

    def program(self, instructions: Sequence[Instruction]) -> tuple[list[ops.Operation], int]:
        """All operations, and the number of those before the first action that may not run ahead. The last ones wait
        for actions that run beside the computations.
        """
        ready = list(takewhile(lambda each: not isinstance(each, Compute) or runs_ahead(each.entry), instructions))
        operations = [operation for instruction in ready for operation in self.lower(instruction)]
        ahead = len(operations)
        operations += [operation for instruction in instructions[len(ready) :] for operation in self.lower(instruction)]
        return [*operations, *(ops.Await(each) for each in operations if isinstance(each, ops.Beside))], ahead

    def lower(self, instruction: Instruction) -> list[ops.Operation]:
        match instruction:
            case Recv(value, peer):
                return [self.post(value, peer)]
            case Compute(entry):
                return self.both(entry) if isinstance(entry, Pair) else self.compute(entry)
            case Send(value, peer):
                return [self.send(value, peer)]
            case Release(value, peer):
                return [transfers.ReleaseSent(value, self.transport.link(peer), self.shared.payloads[value])]

    def post(self, value: Value, peer: int) -> ops.Operation:
        payload = self.shared.payloads[value] = Payload()
        link, device = self.transport.link(peer), self.transport.device
        if value.content is Content.GRADIENT:
            self.shared.waits[value] = transfers.AwaitGradient(value, link, payload)
            start = self.transport.receiver(peer, Tag.GRADIENT)
            sent = self.sends[value.answered]
            return transfers.PostGradient(value, link, payload, start, sent, device)
        if self.known:
            self.shared.waits[value] = transfers.AwaitReceive(value, link, payload)
            return transfers.PostActivation(value, link, payload, self.transport.receiver(peer, Tag.ACTIVATION), device)
        arrival = Arrival(payload, DynamicChannels.receiving(self.transport, peer), device)
        self.shared.waits[value] = WaitDynamic(value, link, arrival, self.inboxes[peer])
        return PostDynamic(value, link, arrival, self.inboxes[peer])

    def send(self, value: Value, peer: int) -> ops.Operation:
        payload, link = self.shared.payloads[value], self.transport.link(peer)
        if value.content is Content.GRADIENT:
            return transfers.SendGradient(value, link, payload, self.transport.sender(peer, Tag.GRADIENT))
        send: SendDynamic | transfers.SendActivation
        if self.known:
            send = transfers.SendActivation(value, link, payload, self.transport.sender(peer, Tag.ACTIVATION))
        else:
            channels = DynamicChannels.sending(self.transport, peer)
            send = SendDynamic(value, link, payload, channels, self.transport.device)
        self.sends[value] = send
        return send

    def compute(self, action: Action) -> list[ops.Operation]:
        """The operations of an action, after waits for values that other streams of the rank make for it."""
        *before, operation = OPERATIONS[action.kind](self.shared, action)
        stream, stages = DATAFLOW[action.kind].stream, self.shared.num_stages
        values = [*needs(action, stages), *filter(None, [self.lasting.get(action)])]
        begun = [self.begun.pop(value) for value in values if value in self.begun]
        others = [each for each in begun if DATAFLOW[each.action.kind].stream is not stream]
        if isinstance(operation, ops.Beside):
            self.begun.update(dict.fromkeys(makes(action, stages), operation))
            operation.after, others = others, []
        return [*map(ops.Await, others), *before, operation]

    def both(self, pair: Pair) -> list[ops.Operation]:
        """The operations before both halves, then the pair."""
        *before, forward = self.compute(pair.forward)
        *also, backward = self.compute(pair.backward)
        assert isinstance(forward, ops.Forward)
        assert isinstance(backward, ops.Backward)
        assert self.overlap is not None
        return [*before, *also, Both(forward, backward, self.overlap, self.shared.stages[pair.backward.stage])]
