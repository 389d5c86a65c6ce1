"""Compile: turns a schedule into the list of operations that a step of this rank calls one after the other. It does so
when a schedule is first used, and keeps the result. Must not contain: batches and losses.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict, deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import filterfalse, takewhile
from typing import NamedTuple

import torch

from pipeflow.core.action import Action, Kind, Pair
from pipeflow.core.analysis.lowering import lower
from pipeflow.core.cost import CostModel
from pipeflow.core.dataflow import DATAFLOW, Content, Value, makes, needs
from pipeflow.core.errors import ScheduleError, UsageError
from pipeflow.core.placement import Placement
from pipeflow.core.program import Compute, Instruction, Program, Recv, Release, Send
from pipeflow.core.route import Routes
from pipeflow.core.rows import first_uses
from pipeflow.core.schedule import Schedule
from pipeflow.core.soundness.verification import verify
from pipeflow.engine.parallel.context import Context
from pipeflow.engine.parallel.transport.agreement import all_gather, connect_devices, told_alike
from pipeflow.engine.parallel.transport.protocol import Channel, Transport
from pipeflow.engine.runtime.confirmation import Confirmation
from pipeflow.engine.runtime.devices import require_placed
from pipeflow.engine.runtime.gradients.fully_sharded import average, fully_sharded_in
from pipeflow.engine.runtime.gradients.step_end import Gradients
from pipeflow.engine.runtime.gradients.sums import Orders, orders_of
from pipeflow.engine.runtime.microbatch import Batch
from pipeflow.engine.runtime.program.actions import OPERATIONS, Shared
from pipeflow.engine.runtime.program.ahead import Ahead, runs_ahead, split_ahead
from pipeflow.engine.runtime.program.graphs import Graphs
from pipeflow.engine.runtime.program.operations import Beside, Doing, Operation, end
from pipeflow.engine.runtime.program.pairs import Both, Half, Overlap
from pipeflow.engine.runtime.program.results import Results
from pipeflow.engine.runtime.program.saved import HostMemory
from pipeflow.engine.runtime.program.slots import Buffers, Metadata, Promise
from pipeflow.engine.runtime.program.wires import (
    ActivationWire,
    Expectations,
    GradientWire,
    Wire,
    starts_of,
    tags_of,
)
from pipeflow.engine.runtime.stage import Stage
from pipeflow.engine.stages.stage import ModuleStage

KEPT = 16  # compiled programs of one pipeline, the most recently used ones
ALIKE = 100  # kinds of steps of which a program remembers the shapes

# Theory of operation
#
# A step must not decide anything: all that is known before it is put into the operations. So the program is walked
# once, and each instruction becomes a bound method of an object that holds what it needs: a `Microbatch` computes, a
# `Wire` transfers. A `Slot` is the place of one value in this rank's memory. What makes the value and what uses it have
# the same slot, so a step passes nothing from one to the next.
#
# `waits` has, per received value, the operation that ends its receive; the action that first uses the value takes it.
# An action beside the computations (a reduction or a copy) is only started where it stands. Its consumer waits for
# it: a computation gets an `end` before it, an action on a third stream gets it in `after`, and the end of the step
# ends all of them.


class Options(NamedTuple):
    """The options of a Pipeline on which its programs depend.

    Attributes:
        promise: the shape and dtype of activations, if they are known in advance.
        overlap: runs a pair; None to run the forward before the backward.
        cost: the times of stages and links, by which receives are posted; None if links take no time.
        routes: pairs of stages that are not neighbours, of which the first sends to the second.
        graph: whether computations of training steps that repeat are recorded as graphs.
    """

    promise: Promise | None
    overlap: Overlap | None
    cost: CostModel | None
    routes: Routes
    graph: bool = False


class RunMode(NamedTuple):
    """The way to run a schedule: the number of microbatches, with or without backwards, with or without averaging over
    replicas.
    """

    microbatches: int
    training: bool
    reduce: bool


@dataclass(slots=True)
class Compiled:
    """A schedule's program on this rank, ready to run. A step puts its batch into the lists that the operations hold.
    The last operations, from `closing` on, step the optimizer. Ranks compare `digest`, a number that stands for the
    schedule; `orders` are those in which they reduce their stages.
    """

    schedule: Schedule
    mode: RunMode
    digest: float
    orders: Orders
    operations: list[Operation]
    closing: int
    ahead: Ahead | None  # if there are any of these
    results: Results
    given: list[tuple[object, ...]]  # arguments of the first stage, by microbatch
    promise: Promise | None  # on which the shapes of activations rely
    wires: list[ActivationWire]
    graphs: Graphs | None
    sizes: list[int] = field(default_factory=list)  # samples per microbatch for which these are prepared
    steps: int = 0  # their number
    first: int = 0  # the first of the steps like the last one
    alike: dict[int, int] = field(default_factory=dict)  # the first of the steps like a step, by its hash
    seen: dict[int, list[tuple[Metadata | None, Metadata | None]]] = field(default_factory=dict)  # in others, by wire

    def is_whole_step_of(self, schedule: Schedule) -> bool:
        """Whether it runs all microbatches of `schedule`."""
        return self.mode.microbatches == schedule.num_microbatches and self.schedule == schedule


class Programs:
    """The programs of one pipeline on this rank, by schedule and mode. Keeps the `KEPT` most recently used ones."""

    def __init__(
        self,
        placement: Placement,
        context: Context,
        stages: Mapping[int, Stage],
        gradients: Gradients,
        options: Options,
    ) -> None:
        self.placement = placement
        self.context = context
        self.stages = stages
        self.gradients = gradients
        self.options = options
        self.host = HostMemory(context.device)
        self.expectations, self.buffers = Expectations(), Buffers(context.device)
        self.confirmation = Confirmation(context)
        self._kept: list[Compiled] = []  # the most recently used one first
        self._sizes: list[int] = []  # samples of each microbatch of the last step

    def join(self, placement: Placement) -> None:
        """Goes on under this placement, with the ranks of the context."""
        self.placement, self.confirmation = placement, Confirmation(self.context)
        self.clear()

    def clear(self) -> None:
        """Drops all programs, because they hold channels of the transport."""
        self._kept.clear()
        self._sizes, self.buffers = [], Buffers(self.context.device)

    def fit(self, compiled: Compiled, batch: Batch, region: torch.autocast | None) -> None:
        """Prepares a program for a batch whose stages run in `region`, if there is one.

        If the sizes determine the lengths of messages and have changed since the last step of any program, the ranks of
        the pipeline compare them first: gloo would end a process whose message is too long. Raises UsageError on all of
        them if the sizes differ, also if they have changed on some ranks alone.
        """
        self.buffers.begin()
        promise, transport, sizes = compiled.promise, self.context.transport, batch.sizes
        if compiled.graphs is not None:
            compiled.graphs.look = self._look(batch, region)
        self.expectations.promise = promise
        self.expectations.known = promise is not None or self._repeats(compiled, batch, region)
        if promise is None:
            return
        if promise.is_open and sizes != self._sizes:
            transport.place.suspects = True
            try:
                read = all_gather(transport, [float(sum(sizes)), float(len(sizes))])
            finally:
                transport.place.suspects = False
            with told_alike(transport):
                if any(row != read[0] for row in read):
                    said = [f"{samples:g} samples in {microbatches:g} microbatches" for samples, microbatches in read]
                    raise UsageError(
                        "the ranks of a pipeline must read the same batch and run the same schedule, but they have "
                        + ", ".join(f"{what} (rank {transport.world_rank(rank)})" for rank, what in enumerate(said))
                    )
            self._sizes = sizes
        if sizes != compiled.sizes:
            for wire in compiled.wires:
                wire.metadata = wire.expected = promise.of(sizes[wire.value.microbatch])
            compiled.sizes = sizes

    def _repeats(self, compiled: Compiled, batch: Batch, region: torch.autocast | None) -> bool:
        """Whether all ranks of the pipeline know that this step is like earlier ones of the program; then wires expect
        what they expected after these. Each rank compares its batch and its stages, and tells the others the first such
        step; hosts wait for hosts only. Between CPUs nobody needs to know. Of stages that were not cut from a planned
        module, shapes may follow from values, and nobody can know.
        """
        transport, modules = self.context.transport, [stage.module for stage in self.stages.values()]
        planned = all(isinstance(module, ModuleStage) for module in modules)
        if transport.device.type == "cpu" or transport.size == 1 or not planned:
            return False
        look = hash(self._look(batch, region))
        compiled.steps += 1
        mine = compiled.steps if self.expectations.vary else compiled.alike.get(look, compiled.steps)
        same = all(first == mine for [first] in all_gather(transport, [float(mine)]))
        compiled.alike[look] = first = mine if same else compiled.steps
        if first != compiled.first:
            compiled.seen[compiled.first] = [(wire.metadata, wire.expected) for wire in compiled.wires]
            before = compiled.seen.pop(first, [(None, None)] * len(compiled.wires))
            for wire, (metadata, expected) in zip(compiled.wires, before, strict=True):
                wire.metadata, wire.expected = metadata, expected
            compiled.first = first
            if len(compiled.seen) > ALIKE:
                del compiled.seen[oldest := next(iter(compiled.seen))]
                compiled.alike = {its: step for its, step in compiled.alike.items() if step != oldest}
        return first < compiled.steps

    def _look(self, batch: Batch, region: torch.autocast | None) -> Hashable:
        """What the shapes of a step follow from, unless from values of tensors."""
        modules = [stage.module for stage in self.stages.values()]
        modes = [each.training for module in modules for each in module.modules()]
        forms = [(each.requires_grad, each.dtype) for module in modules for each in module.parameters()]
        return batch.look(), *modes, *forms, region and region.fast_dtype

    def get(self, schedule: Schedule, mode: RunMode) -> Compiled:
        """The program for `schedule` in this mode, compiled on first use.

        Raises UsageError for a schedule that is not sound, has another placement, or has no backwards when training.
        """
        for position, kept in enumerate(self._kept):
            if kept.mode == mode and (kept.schedule is schedule or kept.schedule == schedule):
                if position:
                    self._kept.insert(0, self._kept.pop(position))
                return kept
        self.context.alarm.expect_slow()  # stages may be compiled, too
        require_sound(schedule, self.placement)
        for stage in self.stages.values():
            require_placed(stage.module, self.context.device)
        made = self._compile(schedule, mode)
        self._kept = [made, *self._kept[: KEPT - 1]]
        return made

    def _compile(self, schedule: Schedule, mode: RunMode) -> Compiled:
        ran = self._training(schedule, reduce=mode.reduce) if mode.training else schedule.forward_only()
        ran = ran.first(mode.microbatches)
        promise, overlap, cost, routes, graph = self.options
        if overlap is None:
            ran = ran.without_pairs()
        if promise is not None and not (mode.training or promise.is_open):  # an open one fits any batch size
            promise = None
        transport, stages = self.context.transport, self.stages
        program = lower(ran, cost, routes)[transport.rank]
        promised = promise is not None
        self._connect(program, promised=promised, training=mode.training)
        parts = ran.num_microbatches * ran.slices
        results = Results(parts, ran.slices)
        given: list[tuple[object, ...]] = [()] * parts
        kinds = defaultdict[tuple[int, int, int | None], frozenset[Kind]](frozenset)
        for action in ran.actions(program.rank):
            kinds[action.stage, action.microbatch, action.slice] |= {action.kind}
        sources = self.context, stages, self.gradients, self.buffers, results, given
        graphs = Graphs(*sources) if graph and mode.training else None
        shared = Shared(
            stages,
            ran.placement.num_stages,
            transport.device,
            self.host,
            self.buffers,
            mode.training,
            self.gradients,
            self.confirmation.step,
            results,
            given,
            routes,
            kinds,
            graphs,
            ran.slices,
        )
        lasting = first_uses(ran.actions(program.rank))
        compiler = _Compiler(shared, transport, self.expectations, promised, overlap, lasting)
        operations, first = compiler.program(program.instructions)
        if mode.training:
            begins, operations = _averaged(operations, stages, mode.reduce)
            operations, first = [*begins, *operations], len(begins) + first
        steps, ahead = list(filter(_steps, operations)), None
        if steps:
            operations, ahead = split_ahead(operations, first, ran, routes)
        operations = [*filterfalse(_steps, operations), *steps]
        compiled = schedule, mode, digest_of(schedule), orders_of(ran), operations, len(operations) - len(steps)
        wires = [wire for wire in compiler.wires.values() if isinstance(wire, ActivationWire)]
        if graphs is not None:
            graphs.operations, graphs.wires = operations, list(compiler.wires.values())
        return Compiled(*compiled, ahead, results, given, promise, wires, graphs)

    def _connect(self, program: Program, *, promised: bool, training: bool) -> None:
        transport, rank = self.context.transport, self.context.transport.rank
        moves = [each for each in program.instructions if isinstance(each, Send | Recv)]
        ends = [(rank, each.peer) if isinstance(each, Send) else (each.peer, rank) for each in moves]
        tags = [tags_of(each.value.content, promised=promised) for each in moves]
        transport.connect(Channel(*pair, tag) for pair, its in zip(ends, tags, strict=True) for tag in its)
        self.context.tensor.connect()
        self.context.connect_grid()
        if training:  # replicas may evaluate at other times, or alone
            connect_devices(self.context.world)
            self.gradients.connect()

    def _training(self, schedule: Schedule, *, reduce: bool) -> Schedule:
        """The schedule with the reductions that the step needs."""
        if schedule.is_forward_only:
            raise UsageError(f"schedule {schedule.name!r} has no backwards: pass forward_only=True")
        steps = Kind.S in schedule.kinds
        if steps and self.confirmation.stepper is None:
            raise UsageError(
                f"schedule {schedule.name!r} steps the optimizer (S), but the Pipeline has none: make a "
                "pipeflow.PipelinedOptimizer(model, optimizer), or use the schedule without these steps"
            )
        if steps and self.options.graph:
            raise UsageError(
                f"schedule {schedule.name!r} steps the optimizer (S), which may run forwards again, so graph=True is "
                "not possible: use the schedule without these steps"
            )
        if steps and not reduce:
            raise UsageError(
                f"schedule {schedule.name!r} steps the optimizer (S) in every call, so gradients of several calls "
                "cannot be accumulated with reduce=False: use the schedule without these steps"
            )
        if not reduce:
            return schedule.without_reductions()  # then copies are exchanged at the end
        has_others = self.context.copies.size > 1 or len(self.placement.paths) > 1
        return schedule.with_reductions() if has_others else schedule


def require_sound(schedule: Schedule, placement: Placement) -> None:
    """Raises UsageError unless `schedule` has this placement, and ScheduleError unless it is sound."""
    if schedule.placement != placement:
        raise UsageError(
            f"schedule {schedule.name!r} has another placement than this Pipeline's stages: "
            f"{schedule.placement.paths}, not {placement.paths}; make a Pipeline for it"
        )
    if violations := verify(schedule):
        raise ScheduleError(f"schedule {schedule.name!r} is not sound:", violations)


def digest_of(schedule: Schedule) -> float:
    """A digest of the schedule, a number that float64 represents exactly."""
    value = repr((schedule.name, schedule.placement, schedule.num_microbatches)) + schedule.to_csv()
    return float(int.from_bytes(hashlib.sha256(value.encode()).digest()[:6]))


def _steps(operation: Operation) -> bool:
    return isinstance(operation.what, Action) and operation.what.kind is Kind.S


def _averaged(
    operations: Sequence[Operation], stages: Mapping[int, Stage], reduce: bool
) -> tuple[list[Operation], list[Operation]]:
    """The operations that begin a step of stages under fully_shard, and `operations` with those that make these stages
    average in their last backward.
    """
    begins, found = list[Operation](), list(operations)
    for index, stage in stages.items():
        if sharded := fully_sharded_in(stage.module):
            begins.append(Operation(partial(average, sharded, now=False), Doing.SWITCH))
            if reduce:
                last = max(position for position, each in enumerate(found) if _is_backward_of(index, each))
                found.insert(last, Operation(partial(average, sharded, now=True), Doing.SWITCH))
    return begins, found


def _is_backward_of(stage: int, operation: Operation) -> bool:
    action = operation.by.backward if isinstance(operation.by, Pair) else operation.what
    return isinstance(action, Action) and action.kind in (Kind.B, Kind.I) and action.stage == stage


@dataclass(slots=True)
class _Compiler:
    shared: Shared
    transport: Transport
    expectations: Expectations
    promised: bool  # True if the user promised the shape of activations
    overlap: Overlap | None
    lasting: Mapping[Action, Value]  # whole weights, by the action that waits for them
    wires: dict[Value, Wire] = field(default_factory=dict)
    inboxes: dict[int, deque[ActivationWire]] = field(default_factory=lambda: defaultdict(deque))
    begun: dict[Value, Beside] = field(default_factory=dict)  # by the value that they make

    def program(self, instructions: Sequence[Instruction]) -> tuple[list[Operation], int]:
        """All operations, and the number of those before the first action that may not run ahead. The last ones wait
        for actions that run beside the computations.
        """
        ready = list(takewhile(lambda each: not isinstance(each, Compute) or runs_ahead(each.entry), instructions))
        operations = [operation for instruction in ready for operation in self.lower(instruction)]
        ahead = len(operations)
        operations += [operation for instruction in instructions[len(ready) :] for operation in self.lower(instruction)]
        begun = [each.by for each in operations if each.doing is Doing.BEGIN]
        return [*operations, *(end(each) for each in begun if isinstance(each, Beside))], ahead

    def lower(self, instruction: Instruction) -> list[Operation]:
        match instruction:
            case Recv(value, peer):
                wire = self.wire(value, peer, receives=True)
                self.shared.waits[value] = Operation(wire.wait, Doing.WAIT, value, wire)
                return [Operation(wire.post, Doing.POST, value, wire)]
            case Compute(entry):
                return self.both(entry) if isinstance(entry, Pair) else self.compute(entry)
            case Send(value, peer):
                wire = self.wire(value, peer, receives=False)
                return [Operation(wire.send, Doing.SEND, value, wire)]
            case Release(value, _):
                wire = self.wires[value]
                return [Operation(wire.release, Doing.RELEASE, value, wire)]

    def wire(self, value: Value, peer: int, *, receives: bool) -> Wire:
        """This rank's end of the wire of a value."""
        starts = starts_of(self.transport, peer, tags_of(value.content, promised=self.promised), receives=receives)
        ends = value, self.shared.slots[value], self.transport.link(peer), self.shared.buffers, starts
        if value.content is Content.GRADIENT:
            wire: Wire = GradientWire(*ends, self.wires[value.answered])
        else:
            wire = ActivationWire(*ends, self.expectations, self.inboxes[peer])
        self.wires[value] = wire
        return wire

    def compute(self, action: Action) -> list[Operation]:
        """The operations of an action, after waits for values that other streams of the rank make for it."""
        *before, operation = OPERATIONS[action.kind](self.shared, action)
        stream, sizes = DATAFLOW[action.kind].stream, (self.shared.num_stages, self.shared.slices)
        values = [*needs(action, *sizes), *filter(None, [self.lasting.get(action)])]
        begun = [self.begun.pop(value) for value in values if value in self.begun]
        others = [each for each in begun if DATAFLOW[each.action.kind].stream is not stream]
        if isinstance(operation.by, Beside):
            self.begun.update(dict.fromkeys(makes(action, *sizes), operation.by))
            operation.by.after, others = others, []
        return [*map(end, others), *before, operation]

    def both(self, pair: Pair) -> list[Operation]:
        """The operations before both halves, then the pair."""
        *before, forward = self.compute(pair.forward)
        *also, backward = self.compute(pair.backward)
        assert self.overlap is not None
        stages = self.shared.stages
        first, second = (
            Half(action, operation.call, stages[action.stage].module)
            for action, operation in ((pair.forward, forward), (pair.backward, backward))
        )
        both = Both(first, second, stages[pair.backward.stage], self.overlap)
        return [*before, *also, Operation(both, Doing.COMPUTE, pair.forward, pair)]
