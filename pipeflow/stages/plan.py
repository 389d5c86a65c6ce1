"""Plan: what each stage of a forward receives, sends and owns, and its script. Found by running the stages on fake
tensors, from the last to the first, and recording which sources flow into their outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from pipeflow.core.errors import UsageError
from pipeflow.core.placement import Placement
from pipeflow.core.route import Routes
from pipeflow.stages.copies import Fakes
from pipeflow.stages.flow import RANDOM, Flow
from pipeflow.stages.script import Node, Run, Script, Value
from pipeflow.stages.trace import Batch, Call, Look, Returned, Trace, decides, explained
from pipeflow.stages.ways import Ways, lay


@dataclass(frozen=True, slots=True)
class StagePlan:
    """The plan of one stage, for batches of certain shapes.

    Attributes:
        script: what the stage does at each call.
        receives: tensors that it needs from earlier stages.
        makes: tensors that it makes for later stages.
        owned: parameters that flow into its output; in the plan of a first batch, the last stage also owns parameters
            that flow into nothing.
        buffers: buffers that flow into its output, and buffers that it writes to.
        is_empty: True if it does nothing, because the forward skips its blocks and all before them, as an encoder's are
            skipped if its output is given.
    """

    script: Script
    receives: tuple[Value, ...]
    makes: tuple[Value, ...]
    owned: frozenset[str]
    buffers: frozenset[str]
    is_empty: bool = False


_EMPTY = StagePlan(Script(Node(), frozenset()), (), (), frozenset(), frozenset(), is_empty=True)


@dataclass(frozen=True, slots=True)
class Plan:
    """The plan of all stages, for batches of certain shapes.

    Attributes:
        stages: plans of the stages, in order.
        trace: the forward that was cut.
        cuts: the last block of every stage except the last one and empty ones.
        ways: what passes to and from each stage.
        routes: the routes that are used, for batches of any shapes.
        sizes: sizes in bytes of tensors of which a tensor rank has only a part.
    """

    stages: tuple[StagePlan, ...]
    trace: Trace
    cuts: tuple[Call, ...]
    ways: tuple[Ways, ...]
    routes: Routes
    sizes: Mapping[Value, int] = field(default_factory=dict)

    def look(self, value: Value) -> Look:
        """The properties of a tensor between stages."""
        return self.trace.look(value.call, value.leaf)

    @property
    def sent_bytes(self) -> tuple[int, ...]:
        """For each stage, the bytes that it sends for a microbatch; its gradients have the same size. Includes tensors
        for other stages of its own rank, which stay in memory.
        """
        stages = enumerate(self.ways)
        return tuple(sum(self.bytes_between(stage, target) for target in ways.gives) for stage, ways in stages)

    def bytes_between(self, source: int, target: int) -> int:
        """The bytes that pass from stage `source` to stage `target` for a microbatch."""
        given = self.ways[source].gives[target]
        return sum(self.sizes[value] if value in self.sizes else self.look(value).nbytes for value in given)

    def sized_by(self, trace: Trace) -> Plan:
        """The same plan with the tensor sizes of `trace`, the forward of one rank's part of the module, if both made
        the same calls.
        """
        if trace.calls_in_order() != self.trace.calls_in_order():
            return self
        local, passing = replace(self, trace=trace), [value for stage in self.stages for value in stage.makes]
        return replace(self, sizes={value: local.look(value).nbytes for value in passing})

    def describe(self) -> list[tuple[Any, ...]]:
        """Plain data that is equal for equal plans."""
        names = [call.name for call in self.trace.calls]
        return [
            (
                [(names[value.call], value, *self.look(value)[:3]) for value in stage.receives],
                sorted(stage.owned),
                sorted(stage.buffers),
            )
            for stage in self.stages
        ]


def make_plan(
    fakes: Fakes,
    trace: Trace,
    cuts: Sequence[Call | None],
    batch: Callable[[], Batch],
    placement: Placement,
    routes: Routes | None,
) -> Plan:
    """The plan of a trace that is cut after the calls `cuts`, of which the first ones may be None.

    `batch` makes a new copy of the batch of the trace. Tensors pass between stages on `routes`; if these are None, on
    the best routes for the `placement`. Raises UsageError if a cut would change what the module computes.
    """
    wanted: tuple[Value, ...] = ()  # needed by later stages
    stages: list[StagePlan] = []
    made, replays = [cut for cut in cuts if cut is not None], False
    for start, end in reversed(list(pairwise([None, *made, None]))):
        _require_known(trace, start)
        try:
            _require_no_leak(trace, fakes, start, replays=replays)
            planned = _Stage(fakes, trace, start, end, wanted, replays=replays).plan(batch())
        except Exception:
            if replays or start is None or not trace.collected(start):
                raise
            replays = True
            _require_no_leak(trace, fakes, start, replays=True)
            planned = _Stage(fakes, trace, start, end, wanted, replays=True).plan(batch())
        stages.insert(0, planned)
        wanted = tuple({*wanted, *planned.receives}.difference(planned.makes))
    stages = [*[_EMPTY] * (len(cuts) - len(made)), *stages]
    laid = lay([stage.makes for stage in stages], [stage.receives for stage in stages], placement, routes)
    return Plan(tuple(stages), trace, tuple(made), *laid)


def completed(plan: Plan, fakes: Fakes, also: Plan | None) -> Plan:
    """The plan, whose stages own in addition what they need in `also`. Parameters and buffers that no stage needs
    belong to the last one.
    """
    parts = zip(plan.stages, (plan if also is None else also).stages, strict=True)
    stages = [replace(one, owned=one.owned | two.owned, buffers=one.buffers | two.buffers) for one, two in parts]
    owned = frozenset(fakes.parameters).difference(*(stage.owned for stage in stages))
    buffers = frozenset(fakes.buffers).difference(*(stage.buffers for stage in stages))
    last = stages[-1]
    stages[-1] = replace(last, owned=last.owned | owned, buffers=last.buffers | buffers)
    return replace(plan, stages=tuple(stages))


def _require_no_leak(trace: Trace, fakes: Fakes, start: Call | None, *, replays: bool) -> None:
    for leak in trace.leaks:
        maker, reader = trace.calls[leak.maker], trace.calls[leak.reader]
        if start is None or not maker.exit <= start.exit <= leak.clock or _is_free(trace, maker, fakes):
            continue
        if not (replays and any(leak.key in call.storages for call in trace.seen_in(maker))):
            raise UsageError(
                f"{maker.name} passes a tensor to {reader.name or 'the module itself'} outside its output, "
                f"through a list, a cache or an attribute, so the forward cannot be cut after {start.name}, between "
                "the two: switch that feature off, or choose other cuts"
            )


def _require_known(trace: Trace, start: Call | None) -> None:
    for index, clock in trace.guesses.items():
        if start is not None and trace.is_within(start.index, index) and start.index != index and clock < start.exit:
            raise UsageError(decides(trace.calls[index].name or "the module's own forward"))


def _is_free(trace: Trace, call: Call, fakes: Fakes) -> bool:
    """Returns True if a call, or one around it, computes from the batch and from buffers alone, so that every stage can
    repeat it.
    """
    while call.index:
        looks = call.looks.values()
        if looks and not any(look.sources & (fakes.of_parameters | RANDOM) for look in looks):
            return True
        call = trace.calls[call.parent]
    return False


class _Stage:
    """The stage from after call `start`, or from the beginning, to call `end`, or to the end. With `replays`, code that
    collects tensors from calls also sees the calls that are replaced.
    """

    def __init__(
        self,
        fakes: Fakes,
        trace: Trace,
        start: Call | None,
        end: Call | None,
        wanted: tuple[Value, ...],
        *,
        replays: bool,
    ) -> None:
        self.fakes, self.trace, self.start, self.end = fakes, trace, start, end
        before = 0 if start is None else start.exit
        self.kept = sorted(value for value in wanted if trace.calls[value.call].exit > before)
        self.collected = [] if start is None or not replays else trace.collected(start)
        self.root = Node()
        self.replaced: list[Call] = []
        self.replayed: list[Call] = []
        self._write()

    def plan(self, batch: Batch) -> StagePlan:
        """Runs the stage on fake tensors."""
        flow = Flow(self.fakes.mode, self.fakes.of_buffers)
        bits, tensors = self.fakes.sources(), self.fakes.tensors()
        own = {name: flow.mark(tensor, bits[name]) for name, tensor in tensors.items()}
        values = [Value(call.index, leaf) for call in self.replaced for leaf in call.looks]
        for call in self.replayed:
            given = [] if call.arguments is None else call.arguments.looks()
            values += [Value(call.index, leaf) for leaf in call.looks if call not in self.replaced]
            values += [Value(call.index, -1 - leaf) for leaf in given]
        value_bits = {value: 2 << (len(bits) + index) for index, value in enumerate(values)}
        stubs = {value: self._stub(self.trace.look(*value)) for value in values}
        keys = {value: flow.mark(stub, value_bits[value]) for value, stub in stubs.items()}
        flow.is_live = self.start is None
        script = Script(
            self.root,
            self._names(),
            frozenset(call.name for call in self.replayed),
            wraps=any(call.is_wrapped for call in self.trace.calls),
        )
        batch_keys = {flow.key(leaf) for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)}
        run = _FakeRun(script, stubs, flow, self.start)
        watched = {name: module for name, module in self.fakes.module.named_modules() if name in script.names}
        with explained(run), torch.enable_grad(), flow:
            output = run.forward(self.fakes.module, watched, batch)
        made = self._made(run, output, flow)
        sources = self._check(made, value_bits)
        used = {value for value, bit in value_bits.items() if bit & sources}
        self._require_gradients(used)
        named = self.fakes.owners(sources)
        buffers = {name for name in self.fakes.buffers if name in named or own[name] in flow.written}
        return StagePlan(
            replace(
                script,
                written=frozenset(value for value in values if keys[value] in flow.written),
                writes_batch=not batch_keys.isdisjoint(flow.written),
            ),
            tuple(sorted(used)),
            tuple(self.kept),
            frozenset(name for name in named if name not in self.fakes.buffers),
            frozenset(buffers),
        )

    def _stub(self, look: Look) -> Tensor:
        with self.fakes.mode, torch.enable_grad():
            tensor = torch.empty_strided(look.shape, look.stride, dtype=look.dtype, device=self.fakes.device)
            return tensor.requires_grad_() * 1 if look.requires_grad else tensor

    def _made(self, run: Run, output: object, flow: Flow) -> list[tuple[str, Look, Look]]:
        """The tensors that the stage made: for each its description, its properties here, and those in the trace."""
        if self.end is not None:
            calls = self.trace.calls
            return [
                (calls[value.call].name, Look.of(run.kept[value], flow), self.trace.look(*value)) for value in self.kept
            ]
        here, there = Returned.of(output, flow), self.trace.returned
        mine, its = here.looks(), there.looks()
        same = here.spec == there.spec and mine.keys() == its.keys()
        if not same or any(mine[leaf].shape != its[leaf].shape for leaf in mine):
            raise UsageError(
                f"cut after {self.start and self.start.name}, the module no longer returns the same "
                f"({len(mine)} tensors, not {len(its)}): tensors that it collects from blocks, such as all hidden "
                "states or caches, are missing; switch that off"
            )
        return [("the module's output", mine[leaf], its[leaf]) for leaf in mine]

    def _check(self, made: Sequence[tuple[str, Look, Look]], bits: dict[Value, int]) -> int:
        """The sources of everything that the stage makes. Raises UsageError if a source that flows into it in the whole
        forward does not do so here.
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
                    f"cut after {self.start and self.start.name}, {what} no longer depends on {missing[0]}: its module "
                    "passes something on outside its output, by writing to its input or to an attribute; return it"
                )
        return found

    def _require_gradients(self, used: Collection[Value]) -> None:
        """Raises UsageError if a reentrant checkpoint, which recomputes everything behind its arguments, would take the
        gradient of a received tensor.
        """
        calls = self.trace.calls
        for value in used:
            call = calls[value.call]
            others = {self.trace.look(*other).storage for other in used if other.call != value.call}
            if call.checkpoint == "reentrant" and call.given & others:
                raise UsageError(
                    f"{call.name} lies within a reentrant checkpoint, and both its input and its output are needed "
                    f"after {self.start and self.start.name}: checkpoint with use_reentrant=False, or cut "
                    "elsewhere"
                )

    def _write(self) -> None:
        """Writes the script."""
        calls, start, skipped = self.trace.calls, self.start, -1
        for call in calls[1:]:
            if start is None or call.exit > start.exit or call.enter < skipped:
                continue
            skipped = call.exit
            if call is start or not _is_free(self.trace, call, self.fakes):
                node = self._node(call)
                node.is_replaced = not _is_free(self.trace, call, self.fakes)
                if node.is_replaced:
                    self.replaced.append(call)
                    node.replays = tuple(
                        each for each in self.collected if self.trace.is_within(each.index, call.index)
                    )
                    self.replayed += node.replays
        for value in self.kept:
            node = self._node(calls[value.call])
            node.keeps = (*node.keeps, value.leaf)
        if self.end is None:
            return
        if self.end.checkpoint is None:
            self._node(self.end).ends = True
            return
        after = self.end.exit
        if following := next((call for call in calls if call.enter > after), None):
            self._node(following).stops = True

    def _node(self, call: Call) -> Node:
        if call.index == 0:
            return self.root
        node = self._node(self.trace.calls[call.parent]).inner.setdefault((call.name, call.turn), Node(call))
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


class _FakeRun(Run):
    """A run that knows in which module it is, and when the stage's own part has begun."""

    def __init__(self, script: Script, stubs: dict[Value, Tensor], flow: Flow, start: Call | None) -> None:
        super().__init__(script, stubs, _never)
        self.flow = flow
        self._start = start
        self.current = ""

    def called(self, name: str, call: Callable[..., Any], arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        outer, self.current = self.current, name
        node = self._node.inner.get((name, self._turns.get(name, 0)))
        output = super().called(name, call, arguments, keywords)
        self.current = outer
        if node is not None and node.call is self._start:
            self.flow.is_live = True
        return output


def _never(value: Value, look: Look) -> Tensor:
    raise AssertionError("a run on fake tensors has all values")
