"""PlanRun: one run of a stage on fake tensors, which finds what the forward writes to in place, and when. Must not
contain: what the plan makes of it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from torch import Tensor

from pipeflow.core.errors import UsageError
from pipeflow.engine.stages.flow import Flow
from pipeflow.engine.stages.identities import Identity
from pipeflow.engine.stages.script import CallNode, Run, Script, TensorRef
from pipeflow.engine.stages.trace import Call, Look, Trace


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
