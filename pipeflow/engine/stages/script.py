"""Script: what a stage does at each call of the module's forward, and one run of it. Calls before the stage's cut are
replaced by received tensors, or by tensors that are never read; outputs to send are kept; after the last call the
forward is stopped. If hooks of a replaced module collect its output, they see the received tensors. A run on fake
tensors finds what the forward writes to in place, and when. Must not contain: how a script is found.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pipeflow.core.errors import UsageError
from pipeflow.engine.stages.absent import Absent, AbsentTensor
from pipeflow.engine.stages.calls import watched
from pipeflow.engine.stages.flow import Flow, Identity
from pipeflow.engine.stages.trace import PLAIN, Batch, Call, Look, Returned, Trace
from pipeflow.engine.torch_private.trees import tree_leaves, tree_unflatten


class TensorRef(NamedTuple):
    """A tensor between stages: leaf `leaf` of the output of call `call` of a trace; if negative, of its arguments."""

    call: int
    leaf: int


@dataclass(slots=True)
class CallNode:
    """The instructions for a call and for the calls within it, which are found by name and turn.

    Attributes:
        call: the call in the trace.
        inner: nodes of the calls within it.
        is_replaced: True if the module is not called.
        replays: calls within it, possibly itself, whose hooks must see their output although the module is replaced.
        passes: leaves of its output that are leaves of its arguments, with these, although the module is replaced.
        keeps: leaves of its output, and of its arguments, that are sent.
        is_told: True if its output has plain values, such as numbers, which later stages take from the trace.
        copies: values to copy at its end, because the forward writes to their memory after it.
        writes: leaves of its arguments to which it writes in place, although the module is replaced.
        ends: True if the forward stops after it.
        stops: True if the forward stops before it, because the last call was within a checkpoint.
    """

    call: Call | None = None
    inner: dict[tuple[str, int], CallNode] = field(default_factory=dict)
    is_replaced: bool = False
    replays: tuple[Call, ...] = ()
    passes: Mapping[int, int] = field(default_factory=dict)
    keeps: tuple[int, ...] = ()
    is_told: bool = False
    copies: tuple[TensorRef, ...] = ()
    writes: tuple[int, ...] = ()
    ends: bool = False
    stops: bool = False


@dataclass(slots=True)
class Script:
    """The instructions for a stage.

    Attributes:
        root: root of its nodes.
        names: names of the modules whose calls must be seen.
        replayed: names of those whose hooks run without them.
        written: values that are written to in place, which need memory of their own.
        writes_batch: True if the forward writes to the batch.
        wraps: True if the forward replaces forwards of its modules; a stopped forward does not restore them.
        mixes: True if it writes tensors that the stage does not have to memory that has values.
    """

    root: CallNode
    names: frozenset[str]
    replayed: frozenset[str] = frozenset()
    written: frozenset[TensorRef] = frozenset()
    writes_batch: bool = False
    wraps: bool = False
    mixes: bool = False


class Stopped(BaseException):
    """Ends a forward after a stage's last call. It is not an Exception, because forwards may catch those."""


class Run:
    """One forward of a stage.

    Args:
        script: script of the stage.
        received: values from other stages.
        make: function that makes a tensor with certain properties whose values are never read.

    Attributes:
        kept: values to send.
    """

    def __init__(
        self, script: Script, received: Mapping[TensorRef, Tensor], make: Callable[[TensorRef, Look], Tensor]
    ) -> None:
        self._script = script
        self._received = received
        self._make = make
        self._node = script.root
        self._turns: dict[str, int] = {}
        self._modules: Mapping[str, nn.Module] = {}
        self._shown: list[Any] = []  # the output that the hooks of a replaced module see
        self.kept: dict[TensorRef, Tensor] = {}

    def forward(self, module: nn.Module, modules: Mapping[str, nn.Module], batch: Batch) -> Any:
        """Runs `module` on a batch. Returns its output, or None if it was stopped."""
        self._modules = modules
        with (
            watched(modules, self.called, self._script.replayed, self._shown),
            _own_forwards(module, self._script.wraps),
        ):
            try:
                return module(*batch[0], **batch[1])
            except Stopped:
                return None

    def called(self, name: str, call: Callable[..., Any], arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """Handles a call as the script says."""
        turn = self._turns.get(name, 0)
        self._turns[name] = turn + 1
        node = self._node.inner.get((name, turn)) or CallNode()
        if node.is_replaced:
            self._write(node, (arguments, keywords))
            return self._replaced(node, (arguments, keywords))
        if node.stops:
            raise Stopped
        outer = self._node, self._turns
        given = tree_leaves((arguments, keywords)) if min(node.keeps, default=0) < 0 else []
        self._node, self._turns = node, {}
        try:
            output = call(*arguments, **keywords)
        finally:
            self._node, self._turns = outer
        if (node.keeps or node.is_told) and node.call is not None:
            self._keep(node.call, node.keeps, output, given)
        for value in node.copies:
            self.kept[value] = self._copy(value)
        if node.ends:
            raise Stopped
        return output

    def _keep(self, call: Call, leaves: Sequence[int], output: object, arguments: Sequence[Any]) -> None:
        found, returned = tree_leaves(output), call.returned
        if returned is None or len(found) != len(returned.leaves):
            raise UsageError(f"{call.name} returned a different structure than when its forward was traced")
        self._require_told(call.name, found, returned.leaves)
        for leaf in leaves:
            self.kept[TensorRef(call.index, leaf)] = found[leaf] if leaf >= 0 else arguments[-1 - leaf]

    def _require_told(self, name: str, found: Sequence[object], traced: Sequence[object]) -> None:
        """Raises UsageError if a call returned other plain values than in the trace, from which later stages have
        them.
        """
        for mine, its in zip(found, traced, strict=True):
            if isinstance(mine, PLAIN) or isinstance(its, PLAIN):
                is_same = type(mine) is type(its) and (mine == its or mine != mine)
                if not is_same:
                    raise UsageError(
                        f"{name} returned {_said(mine)}, but {_said(its)} when the forward was planned, and later "
                        "stages take it for that, since tensors alone are sent: return a tensor on every way"
                    )

    def _copy(self, value: TensorRef) -> Tensor:
        """A copy of a kept value in the same graph: its gradient is that of the tensor before later writes."""
        return self.kept[value].clone()

    def _write(self, node: CallNode, given: object) -> None:
        """Writes to the arguments of a replaced call what the call wrote."""
        for index, tensor in self._written(node, given):
            assert node.call is not None
            value = TensorRef(node.call.index, -1 - index)
            written = self._tensor(value, node.call.look(value.leaf), node.call)
            if isinstance(tensor, AbsentTensor):
                tensor.become(written.clone())
            else:
                tensor.copy_(written)

    def _written(self, node: CallNode, given: object) -> list[tuple[int, Tensor]]:
        leaves = tree_leaves(given) if node.writes else []
        return [(index, leaves[index]) for index in node.writes]

    def _replaced(self, node: CallNode, given: object) -> Any:
        assert node.call is not None
        leaves = tree_leaves(given) if node.passes else []
        if node.passes and len(leaves) != node.call.num_given:
            raise UsageError(f"{node.call.name} was given other arguments than when its forward was traced")
        passed = {index: leaves[argument] for index, argument in node.passes.items()}
        output = self._instead(node.call, node.call.returned, passed)
        for call in node.replays:
            self._replay(call, output if call is node.call else self._instead(call, call.returned))
        return output

    def _instead(self, call: Call, tree: Returned | None, passed: Mapping[int, Any] = MappingProxyType({})) -> Any:
        """A tree like the output of a call, or its arguments, made of received tensors, with the leaves `passed`."""
        assert tree is not None
        leaves: list[Any] = []
        for index, leaf in enumerate(tree.leaves):
            if index in passed:
                leaves.append(passed[index])
            elif isinstance(leaf, Look):
                leaves.append(
                    self._tensor(TensorRef(call.index, index if tree is call.returned else -1 - index), leaf, call)
                )
            else:
                leaves.append(_absent(call.name, leaf.__name__) if isinstance(leaf, type) else leaf)
        return tree_unflatten(leaves, tree.spec)

    def _replay(self, call: Call, output: Any) -> None:
        """Shows a call that is not made to the hooks of a module, or to the wrapper of its forward."""
        arguments, keywords = self._instead(call, call.arguments)
        self._shown.append(output)
        self._modules[call.name]._call_impl(*arguments, **keywords)
        if self._shown:
            self._shown.clear()
            raise UsageError(
                f"the forward of {call.name} was replaced, so tensors that hooks collect from its calls cannot be "
                "passed on: cut elsewhere"
            )

    def _tensor(self, value: TensorRef, look: Look, call: Call) -> Tensor:
        received = self._received.get(value)
        if received is None:
            return self._make(value, look)
        if call.checkpoint == "reentrant" and received.requires_grad:
            # A view with a graph: otherwise torch detaches what a reentrant checkpoint returns.
            with torch.enable_grad():
                return received.view_as(received)
        return received


class PlanRun(Run):
    """A run that knows in which module it is, when the stage's own part has begun, and what it writes to.

    Args:
        script: script of the stage, in which all values that are kept are copied, and all writes are made.
        stubs: tensors in place of the values from other stages.
        bits: bits of these values as sources.
        flow: flow under which it runs, in which the stubs are marked.
        start: the last call of the stage before; None for the first stage.
        trace: the forward that is cut.

    Attributes:
        current: name of the module whose call runs.
        given: for each replaced call, the sources of its arguments.
    """

    def __init__(
        self,
        script: Script,
        stubs: Mapping[TensorRef, Tensor],
        bits: Mapping[TensorRef, int],
        flow: Flow,
        start: Call | None,
        trace: Trace,
    ) -> None:
        super().__init__(script, stubs, _never)
        self.flow = flow
        self.current = ""
        self.given: dict[int, int] = {}
        self.identities: dict[TensorRef, Identity] = {}  # of copied values, since a copy has strides of its own
        self._start, self._trace, self._bits = start, trace, bits
        self._keys = {value: flow.key(stub) for value, stub in stubs.items()}
        self._sharing: dict[int, list[TensorRef]] = defaultdict(list)  # by their memory in the trace
        for value in stubs:
            self._sharing[trace.look(*value).storage].append(value)
        self._made: dict[
            TensorRef, dict[TensorRef, int]
        ] = {}  # when a value is made: writes to others in the same memory
        self._copied: dict[TensorRef, tuple[int, int]] = {}  # memory and writes to it when a value is copied
        self._overwritten: dict[TensorRef, int] = {}  # memory to which a replaced call writes the value

    def called(self, name: str, call: Callable[..., Any], arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        outer, self.current = self.current, name
        node = self._node.inner.get((name, self._turns.get(name, 0)))
        output = super().called(name, call, arguments, keywords)
        self.current = outer
        if node is not None and node.call is self._start:
            self.flow.is_live = True
        return output

    def _require_told(self, *_: object) -> None:
        """Requires nothing: values may be guessed, and numbers drawn anew."""

    def _copy(self, value: TensorRef) -> Tensor:
        key = self.flow.key(self.kept[value])
        self._copied[value] = key, self.flow.written[key]
        self.identities[value] = identity = self.flow.identities.of(self.kept[value])
        copy = super()._copy(value)
        self.flow.identities.give(copy, identity)
        return copy

    def _write(self, node: CallNode, given: object) -> None:
        """Only marks the memory, since unused values are not written."""
        assert node.call is not None
        self.given[node.call.index] = self.flow.sources(given)
        for index, tensor in self._written(node, given):
            value = TensorRef(node.call.index, -1 - index)
            self._overwritten[value] = self.flow.overwrite(tensor, self._bits[value])
            self.flow.identities.give(tensor, self._trace.look(*value).identity)

    def _tensor(self, value: TensorRef, look: Look, call: Call) -> Tensor:
        sharing = self._sharing[self._trace.look(*value).storage]
        self._made[value] = {other: self.flow.written[self._keys[other]] for other in sharing}
        return super()._tensor(value, look, call)

    def written(self, used: Collection[TensorRef]) -> set[int]:
        """The memory to which the stage writes if it uses the values `used`."""
        return {*self.flow.written, *(key for value, key in self._overwritten.items() if value in used)}

    def rewritten(self, values: Iterable[TensorRef]) -> tuple[TensorRef, ...]:
        """Those of the copied `values` to whose memory the stage writes after the copy."""
        now = self.flow.written
        return tuple(each for each in values if now[self._copied[each][0]] > self._copied[each][1])

    def require_separate(self, used: Collection[TensorRef]) -> None:
        """Raises UsageError if the stage writes to one of several values that share memory, and uses another: they are
        received separately.
        """
        calls, now = self._trace.calls, self.flow.written
        for value in used:
            if value in self._overwritten:
                continue
            maker, mine = calls[value.call], self._keys[value]
            writers = [other for other, before in self._made.get(value, {}).items() if now[self._keys[other]] > before]
            storage = self._trace.look(*value).storage
            writers += [
                other
                for other, key in self._overwritten.items()
                if other in used and key != mine and self._trace.look(*other).storage == storage
                if calls[other.call].enter > maker.exit
            ]
            if writer := next((each for each in writers if self._keys[each] != mine), None):
                names = " and ".join(dict.fromkeys([maker.name, calls[writer.call].name]))
                raise UsageError(
                    f"the forward writes in place to one of several tensors of {names} that share memory, and needs "
                    f"another of them after {self._start and self._start.name}: write to a copy instead (x = x + y, "
                    "not x += y), or cut elsewhere"
                )


def _never(value: TensorRef, look: Look) -> Tensor:
    raise AssertionError("a run on fake tensors has all values")


@contextmanager
def _own_forwards(module: nn.Module, wraps: bool) -> Iterator[None]:
    """At the end, restores forwards of modules that were replaced inside."""
    before = {each: vars(each).get("forward") for each in module.modules()} if wraps else {}
    try:
        yield
    finally:
        for each, own in before.items():
            if own is not None:
                vars(each)["forward"] = own
            else:
                vars(each).pop("forward", None)


def _said(leaf: object) -> str:
    return "a tensor" if isinstance(leaf, Tensor | Look) else repr(leaf)


def _absent(module: str, kind: str) -> Absent:
    """Stands for an object that an earlier stage returned and that is no tensor."""
    return Absent(
        f"{module} returned a {kind} that a later stage needs, but stages receive tensors only: register its class "
        "with torch.utils._pytree, or cut elsewhere"
    )
