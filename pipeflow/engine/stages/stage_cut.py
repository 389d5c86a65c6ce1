"""Makes the plan of a forward that is cut: runs the stages on fake tensors, from the last to the first, and records
which sources flow into their outputs, what each stage needs, and what it makes. Must not contain: where stages begin
and end.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from pipeflow.core.errors import UsageError
from pipeflow.core.placement import Placement
from pipeflow.core.route import Routes
from pipeflow.engine.stages.blocks import lay
from pipeflow.engine.stages.copies import Fakes
from pipeflow.engine.stages.flow import RANDOM, Flow, Identity
from pipeflow.engine.stages.plan import CutPlan, StagePlan
from pipeflow.engine.stages.script import CallNode, PlanRun, Script, TensorRef
from pipeflow.engine.stages.trace import Batch, Call, Look, Returned, Trace, decides, explained, flattened
from pipeflow.engine.torch_private.trees import tree_leaves

# Theory of operation
#
# The stages are planned from the last to the first, since a stage must make what later ones need. For each stage a
# `Script` is written from the trace: calls before `start` are replaced, all others run, and the forward stops after
# `end`. Then the stage runs once with that script on fake tensors. In place of each output of a replaced call it gets a
# stub, and each stub, parameter and buffer is a source with a bit of its own (`flow`). The sources of what the stage
# makes say which stubs it really needs (these are received) and which parameters and buffers it owns.
#
# The run also proves the cut. In the whole forward the same outputs have sources too; one that is missing here, and
# does not come in through a received value, went a way that the script cannot see: through an attribute, a list or a
# cache. That raises an error, as does a value that other operators made, or the same from other tensors (`identities`).
# What the forward reads to branch on is needed like a source of its results (`Flow.read`), as is what it writes to
# buffers. A stub of a mask, or of whole numbers, has the values that the trace knew or guessed, so that the stage takes
# the branches of the trace.
# Calls that depend on the batch alone (`is_free`) are not replaced: each stage has the batch and repeats them, so
# nothing need be sent.


def is_free(trace: Trace, call: Call, fakes: Fakes) -> bool:
    """Returns True if a call, or one around it, computes from the batch and from buffers alone, so that every stage can
    repeat it.
    """
    while call.index:
        looks = call.looks.values()
        if looks and not any(look.sources & (fakes.of_parameters | RANDOM) for look in looks):
            return True
        call = trace.calls[call.parent]
    return False


class StageCut:
    """The stage from after call `start`, or from the beginning, to call `end`, or to the end. Hooks also see the calls
    `collected`, which are replaced.
    """

    def __init__(
        self,
        fakes: Fakes,
        trace: Trace,
        start: Call | None,
        end: Call | None,
        wanted: tuple[TensorRef, ...],
        collected: list[Call],
        ends: Sequence[int],
    ) -> None:
        self.fakes, self.trace, self.start, self.end, self.ends = fakes, trace, start, end, ends
        before = 0 if start is None else start.exit
        self.kept = sorted(value for value in wanted if trace.calls[value.call].exit > before)
        self.collected = collected
        self.root = CallNode()
        self.replaced: list[Call] = []
        self.replayed: list[Call] = []
        self._write()

    def plan(self, batch: Batch) -> StagePlan:
        """Runs the stage on fake tensors. Returns its plan. Raises UsageError if it does not compute what the whole
        forward does.
        """
        flow = self.fakes.flow()
        own = {name: flow.key(tensor) for name, tensor in self.fakes.tensors().items()}
        values = self._values()
        value_bits = {value: 2 << (len(self.fakes.bits) + index) for index, value in enumerate(values)}
        stubs = {value: self._stub(self.trace.look(*value)) for value in values}
        keys = {value: flow.give(stub, value_bits[value], self._identity(value)) for value, stub in stubs.items()}
        for value in values:
            if self.trace.look(*value).value is not None:
                flow.keep_values(stubs[value])
        flow.is_live = self.start is None
        replayed = frozenset(call.name for call in self.replayed)
        script = Script(self.root, self._names(), replayed, wraps=any(call.is_wrapped for call in self.trace.calls))
        batch_keys = {flow.key(leaf) for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)}
        run = PlanRun(script, stubs, value_bits, flow, self.start, self.trace)
        module = self.fakes.module
        watched = {name: each for name, each in module.named_modules() if name in script.names}
        with explained(flow, lambda: run.current), self.fakes.unchanged(), flow:
            output = run.forward(module, watched, batch)
        made = self._made(run, output, flow)
        sources = self._check(made, value_bits) | flow.read
        sources |= flow.sources_written([own[name] for name in self.fakes.buffers])
        used = {value for value, bit in value_bits.items() if bit & sources}
        self._require_gradients(used, sources, value_bits, run.given)
        run.require_separate(used)
        self._require_same(made)
        written = run.written(used)
        self._write_only(used, run)
        named = self.fakes.owners(sources)
        writes = frozenset(name for name in self.fakes.buffers if own[name] in written)
        absent = (self.fakes.of_parameters | sum(value_bits.values())) & ~sources
        buffers = writes | set(self.fakes.buffers).intersection(named)
        return StagePlan(
            replace(
                script,
                written=frozenset(value for value in values if keys[value] in written),
                writes_batch=not batch_keys.isdisjoint(written),
                mixes=any(there & absent and not before & absent for before, there in flow.mixed),
            ),
            tuple(sorted(used)),
            tuple(self.kept),
            frozenset(name for name in named if name not in self.fakes.buffers),
            buffers,
            writes,
        )

    def _values(self) -> list[TensorRef]:
        """The tensors that the stage may need: results and writes of replaced calls, and what hooks see of them."""
        values = [
            TensorRef(call.index, leaf)
            for call in self.replaced
            for leaf in call.looks
            if leaf not in self._node(call).passes
        ]
        values += [TensorRef(call.index, -1 - leaf) for call in self.replaced for leaf in call.writes]
        for call in self.replayed:
            given = [] if call.arguments is None else call.arguments.looks()
            values += [TensorRef(call.index, leaf) for leaf in call.looks]
            values += [TensorRef(call.index, -1 - leaf) for leaf in given]
        return list(dict.fromkeys(values))

    def _is_of_batch(self, look: Look) -> bool:
        """Returns True for a tensor that every stage can compute itself."""
        return not look.sources & (self.fakes.of_parameters | RANDOM)

    def _stub(self, look: Look) -> Tensor:
        """In place of a value that the stage does not compute, with the values that the trace has, if any."""
        reach = sum((size - 1) * step for size, step in zip(look.shape, look.stride, strict=True))
        if look.value is not None and look.value.numel():
            return look.value.as_strided((reach + 1,), (1,)).clone().as_strided(look.shape, look.stride)
        with self.fakes.mode, torch.enable_grad():
            memory = torch.empty(reach + 1, dtype=look.dtype, device=self.fakes.device)
            memory = memory.requires_grad_() * 1 if look.requires_grad else memory
            return memory.as_strided(look.shape, look.stride)  # with the places that views have in the whole forward

    def _identity(self, value: TensorRef) -> Identity:
        """How a value was computed in the whole forward when its stage sends it."""
        call = self.trace.calls[value.call]
        end = next(each for each in self.ends if each >= call.exit)
        return self.trace.identity(call.look(value.leaf), self.trace.around(call, end).exit)

    def _made(self, run: PlanRun, output: object, flow: Flow) -> list[tuple[str, Look, Look]]:
        """The tensors that the stage made: for each its description, its properties here, and those in the trace."""
        if self.end is not None:
            calls = self.trace.calls
            kept = {value: Look.of(run.kept[value], flow) for value in self.kept}
            return [
                (
                    calls[value.call].name,
                    mine._replace(identity=run.identities.get(value, mine.identity)),
                    self.trace.look(*value)._replace(identity=self._identity(value)),
                )
                for value, mine in kept.items()
            ]
        here, there = Returned.of(*flattened(output), flow), self.trace.returned
        mine, its = here.looks(), there.looks()
        same = here.spec == there.spec and mine.keys() == its.keys()
        if not same or any(mine[leaf].shape != its[leaf].shape for leaf in mine):
            raise UsageError(
                f"after a cut at {self.start and self.start.name}, the module no longer returns the same "
                f"({len(mine)} tensors, not {len(its)}): tensors that it collects from blocks, such as all hidden "
                "states or caches, are missing; switch off their collection"
            )
        return [("the module's output", mine[leaf], its[leaf]) for leaf in mine]

    def _check(self, made: Sequence[tuple[str, Look, Look]], bits: dict[TensorRef, int]) -> int:
        """The sources of everything that the stage makes. Raises UsageError if such a value lacks a source that it has
        in the whole forward.
        """
        found = 0
        for what, here, there in made:
            found |= here.sources
            through = here.sources
            for value, bit in bits.items():
                if here.sources & bit:
                    through |= self.trace.look(*value).sources
            if here.sources & RANDOM:
                raise UsageError(
                    f"{what} depends on random numbers that the forward draws before {self.start and self.start.name} "
                    "ends, outside the blocks, so every stage would draw different ones: draw them in a module, "
                    "whose output is sent"
                )
            if missing := self.fakes.owners(there.sources & ~through & self.fakes.of_parameters):
                raise UsageError(
                    f"after a cut at {self.start and self.start.name}, {what} no longer depends on {missing[0]}: its "
                    "module passes a value on outside its output, by writing to its input or to an attribute; return "
                    "this value"
                )
        return found

    def _require_same(self, made: Sequence[tuple[str, Look, Look]]) -> None:
        """Raises UsageError if something that the stage makes is computed in another way than in the whole forward. One
        that is the whole forward may find a cache filled, or draw other numbers.
        """
        if self.start is None and self.end is None:
            return
        if other := next((what for what, here, there in made if here.identity != there.identity), None):
            raise UsageError(
                f"after a cut at {self.start and self.start.name}, {other} is computed from other tensors than in the "
                "whole module: it picks some of those that it collects from blocks, such as hidden states; switch off "
                "their collection, or cut elsewhere"
            )

    def _require_gradients(
        self, used: Collection[TensorRef], sources: int, bits: Mapping[TensorRef, int], given: Mapping[int, int]
    ) -> None:
        """Raises UsageError if a reentrant checkpoint, which recomputes everything behind its arguments, would take the
        gradient of a received tensor. It does so if its arguments require a gradient in this stage: if they depend on
        received values or on parameters in `sources`. `given` are the sources of its arguments.
        """
        floating = (value for value in used if self.trace.look(*value).dtype.is_floating_point)
        tracked = sum(
            bits[value]
            for value in floating  # within a reentrant checkpoint nothing requires a gradient yet
            if self.trace.look(*value).requires_grad or self.trace.calls[value.call].checkpoint == "reentrant"
        )
        own = self.fakes.module.named_parameters()
        tracked |= sum(self.fakes.bits[name] for name, each in own if each.requires_grad) & sources
        for value in used:
            call = self.trace.calls[value.call]
            if call.checkpoint == "reentrant" and given.get(call.index, 0) & tracked:
                raise UsageError(
                    f"{call.name} lies within a reentrant checkpoint, and both its input and its output are needed "
                    f"after {self.start and self.start.name}: checkpoint with use_reentrant=False, or cut "
                    "elsewhere"
                )

    def _write(self) -> None:
        """Writes the script of this stage from the traced calls."""
        calls, start, skipped = self.trace.calls, self.start, -1
        for call in calls[1:]:
            if start is None or call.exit > start.exit or call.enter < skipped:
                continue
            skipped = call.exit
            if call is start or not is_free(self.trace, call, self.fakes):
                node = self._node(call)
                node.is_replaced = not is_free(self.trace, call, self.fakes)
                if node.is_replaced:
                    node.passes = {
                        leaf: given for leaf, given in call.passes.items() if self._is_of_batch(call.look(leaf))
                    }
                    node.writes = call.writes
                    self.replaced.append(call)
                    node.replays = tuple(
                        each for each in self.collected if self.trace.is_within(each.index, call.index)
                    )
                    self.replayed += node.replays
        for value in self.kept:
            node = self._node(calls[value.call])
            node.keeps = (*node.keeps, value.leaf)
            node = self._copying(calls[value.call])
            node.copies = (*node.copies, value)
        if self.end is None:
            return
        for call in calls[1:]:
            mine = (0 if start is None else start.exit) < call.exit <= self.end.exit
            if mine and call is self.trace.around(call, self.end.exit) and call.tells:
                self._node(call).is_told = not is_free(self.trace, call, self.fakes)
        if self.end.checkpoint is None:
            self._node(self.end).ends = True
            return
        after = self.end.exit
        if following := next((call for call in calls if call.enter > after), None):
            self._node(following).stops = True

    def _copying(self, call: Call) -> CallNode:
        """The node at whose end an output of `call` is copied: the outermost call that ends in this stage. What later
        stages replace is that call, and who collects the output sees what is written to it until there.
        """
        assert self.end is not None
        return self._node(self.trace.around(call, self.end.exit))

    def _write_only(self, used: Collection[TensorRef], run: PlanRun) -> None:
        """Leaves only those writes and copies in the script that are needed."""
        for call in self.replaced:
            node = self._node(call)
            node.writes = tuple(leaf for leaf in node.writes if TensorRef(call.index, -1 - leaf) in used)
        for value in self.kept:
            node = self._copying(self.trace.calls[value.call])
            node.copies = run.rewritten(node.copies)

    def _node(self, call: Call) -> CallNode:
        if call.index == 0:
            return self.root
        node = self._node(self.trace.calls[call.parent]).inner.setdefault((call.name, call.turn), CallNode(call))
        assert node.call is call
        return node

    def _names(self) -> frozenset[str]:
        """The modules in the script, and those that call any of these, because turns are counted within a call."""
        names: set[str] = set()
        pending = [self.root]
        while pending:
            node = pending.pop()
            names |= {name for name, _ in node.inner}.union(call.name for call in node.replays)
            pending += node.inner.values()
        around: set[int] = {0}
        for call in self.trace.calls:
            index = call.index if call.name in names else 0
            while index not in around:
                around.add(index)
                index = self.trace.calls[index].parent
        return frozenset(names.union(self.trace.calls[index].name for index in around)) - {""}


# Theory of operation
#
# From the last stage to the first: `wanted` are the tensors that the stages after it receive. A stage sends those that
# it makes itself, and the stage before is asked for the rest, so each tensor is sent by the stage that computes it.
#
# Models may collect outputs of their blocks by hooks (all hidden states, say). A hook of a replaced call can be run on
# the received tensor, but each replay means one more tensor to send. So a stage is planned without replays first. If it
# then does not compute what the whole forward does, it is planned with the replays of hooks that surely collect, and at
# last with all.

_EMPTY = StagePlan(Script(CallNode(), frozenset()), (), (), frozenset(), frozenset(), is_empty=True)


def make_plan(
    fakes: Fakes,
    trace: Trace,
    cuts: Sequence[Call | None],
    batch: Callable[[], Batch],
    placement: Placement,
    routes: Routes | None,
) -> CutPlan:
    """The plan of a trace that is cut after the calls `cuts`, of which the first ones may be None.

    `batch` makes a new copy of the batch of the trace. Tensors pass between stages on `routes`; if these are None, on
    the best routes for the `placement`. Raises UsageError if a cut would change what the module computes.
    """
    wanted: tuple[TensorRef, ...] = ()  # needed by later stages
    stages: list[StagePlan] = []
    made = [cut for cut in cuts if cut is not None]
    ends = [cut.exit for cut in made]
    for start, end in reversed(list(pairwise([None, *made, None]))):
        _require_known(trace, start)
        planned = _planned(fakes, trace, start, end, wanted, batch, ends)
        stages.insert(0, planned)
        wanted = tuple({*wanted, *planned.receives}.difference(planned.makes))
    stages = [*[_EMPTY] * (len(cuts) - len(made)), *stages]
    _require_separate_buffers(stages, placement)
    laid = lay([stage.makes for stage in stages], [stage.receives for stage in stages], placement, routes)
    return CutPlan(tuple(stages), trace, tuple(made), *laid)


def _planned(
    fakes: Fakes,
    trace: Trace,
    start: Call | None,
    end: Call | None,
    wanted: tuple[TensorRef, ...],
    batch: Callable[[], Batch],
    ends: Sequence[int],
) -> StagePlan:
    """The plan of the stage between two cuts. Hooks see calls that are replaced only if the stage does not compute the
    same without: first those hooks that surely collect tensors, then all.
    """
    attempts: list[list[Call]] = [[]]
    if start is not None:
        attempts += [trace.seen_until(start, trace.collectors), trace.seen_until(start)]
    raised: Exception | None = None
    for attempt, seen in enumerate(attempts):
        if attempt and seen in attempts[:attempt]:
            continue
        try:
            _require_no_leak(trace, fakes, start, replays=bool(seen))
            return StageCut(fakes, trace, start, end, wanted, seen, ends).plan(batch())
        except Exception as error:
            raised = error if raised is None or attempt == 1 else raised
    assert raised is not None
    raise raised


def _require_separate_buffers(stages: Sequence[StagePlan], placement: Placement) -> None:
    """Raises UsageError if two stages of a rank write to the same buffer: each repeats the writes of the forward."""
    for rank in range(placement.num_ranks):
        writers: dict[str, int] = {}
        for stage in placement.stages_of(rank):
            for name in sorted(stages[stage].writes):
                first = writers.setdefault(name, stage)
                if first != stage:
                    raise UsageError(
                        f"the forward writes to the buffer {name} outside of its blocks, so stages {first} and "
                        f"{stage}, both on rank {rank}, would each write to it: write to it within a block, or use a "
                        "schedule with one stage per rank"
                    )


def completed(plan: CutPlan, fakes: Fakes, also: Sequence[CutPlan]) -> CutPlan:
    """The plan, whose stages own in addition what they need in the plans `also`. Parameters and buffers that no stage
    needs belong to the last one.
    """
    stages = list(plan.stages)
    for other in also:
        parts = zip(stages, other.stages, strict=True)
        stages = [replace(one, owned=one.owned | two.owned, buffers=one.buffers | two.buffers) for one, two in parts]
    owned = frozenset(fakes.parameters).difference(*(stage.owned for stage in stages))
    buffers = frozenset(fakes.buffers).difference(*(stage.buffers for stage in stages))
    last = stages[-1]
    stages[-1] = replace(last, owned=last.owned | owned, buffers=last.buffers | buffers)
    return replace(plan, stages=tuple(stages))


def _require_no_leak(trace: Trace, fakes: Fakes, start: Call | None, *, replays: bool) -> None:
    for leak in trace.leaks:
        maker, reader = trace.calls[leak.maker], trace.calls[leak.reader]
        if start is None or not maker.exit <= start.exit <= leak.clock or is_free(trace, maker, fakes):
            continue
        if not (replays and any(leak.key in call.storages for call in trace.seen_in(maker))):
            raise UsageError(
                f"{maker.name} passes a tensor to {reader.name or 'the module itself'} outside its output, "
                f"through a list, a cache or an attribute, so the forward cannot be cut after {start.name}, between "
                "the two: return the tensor and pass it on as an argument, switch such a cache off if that is an "
                "option of the model, or let both be in one stage by cuts="
            )


def _require_known(trace: Trace, start: Call | None) -> None:
    for index, clock in trace.guesses.items():
        if start is not None and trace.is_within(start.index, index) and start.index != index and clock < start.exit:
            raise UsageError(decides(trace.calls[index].name or "the module's own forward"))
