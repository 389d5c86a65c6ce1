"""Script: what a stage does at which calls of the module's forward, and one run of it. Calls before the stage's cut are
replaced by what was received, or by tensors that nobody reads; calls whose outputs are sent are kept; after the last
one the forward is stopped. What must not live here: how a script is found.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_unflatten

from pipeflow.core.errors import UsageError
from pipeflow.stages.calls import watched
from pipeflow.stages.trace import Batch, Call, Look, Returned, Unknown


class Value(NamedTuple):
    """A tensor between stages: a leaf of what a call of a trace returned."""

    call: int
    leaf: int


@dataclass(slots=True)
class Node:
    """What to do at a call, and at those within it, by name and turn.

    Attributes:
        call: of the trace.
        is_replaced: whether the module is not called.
        keeps: the leaves of its output that are sent.
        ends: whether the forward is stopped after it.
        stops: whether the forward is stopped before it, since the last call lay within a checkpoint.
    """

    call: Call | None = None
    inner: dict[tuple[str, int], Node] = field(default_factory=dict)
    is_replaced: bool = False
    keeps: tuple[int, ...] = ()
    ends: bool = False
    stops: bool = False


@dataclass(slots=True)
class Script:
    """The root of a stage's nodes, the modules whose calls must be seen, and the values that are written to in place,
    which need memory of their own.
    """

    root: Node
    names: frozenset[str]
    written: frozenset[Value] = frozenset()


class Stopped(BaseException):
    """Ends a forward after a stage's last call. No Exception, which forwards may catch."""


class Run:
    """One forward of a stage.

    Args:
        script: of the stage.
        received: the values that came from other stages.
        make: makes a tensor that nobody reads, of a certain look.

    Attributes:
        kept: the values that were made to be sent.
    """

    def __init__(self, script: Script, received: Mapping[Value, Tensor], make: Callable[[Value, Look], Tensor]) -> None:
        self._script = script
        self._received = received
        self._make = make
        self._node = script.root
        self._turns: dict[str, int] = {}
        self.kept: dict[Value, Tensor] = {}

    def forward(self, module: nn.Module, modules: Mapping[str, nn.Module], batch: Batch) -> Any:
        """Runs `module` on a batch; what it returns, or None where it was stopped."""
        with watched(modules, self):
            try:
                return module(*batch[0], **batch[1])
            except Stopped:
                return None

    def called(self, name: str, call: Callable[..., Any], arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """Does at a call what the script says."""
        turn = self._turns.get(name, 0)
        self._turns[name] = turn + 1
        node = self._node.inner.get((name, turn)) or Node()
        if node.is_replaced:
            assert node.call is not None
            return self._replaced(node.call)
        if node.stops:
            raise Stopped
        outer = self._node, self._turns
        self._node, self._turns = node, {}
        try:
            output = call(*arguments, **keywords)
        finally:
            self._node, self._turns = outer
        if node.keeps and node.call is not None:
            self._keep(node.call, node.keeps, output)
        if node.ends:
            raise Stopped
        return output

    def _keep(self, call: Call, leaves: Sequence[int], output: object) -> None:
        found = tree_leaves(output)
        returned = call.returned
        if returned is None or len(found) != len(returned.leaves):
            raise UsageError(f"{call.name} returned another tree than when its forward was traced")
        for leaf in leaves:
            self.kept[Value(call.index, leaf)] = found[leaf]

    def _replaced(self, call: Call) -> Any:
        assert isinstance(call.returned, Returned)
        leaves: list[Any] = []
        for index, leaf in enumerate(call.returned.leaves):
            if isinstance(leaf, Look):
                leaves.append(self._tensor(Value(call.index, index), leaf, call))
            else:
                leaves.append(_Absent(call.name, leaf.kind) if isinstance(leaf, Unknown) else leaf)
        return leaves[0] if call.returned.is_bare else tree_unflatten(leaves, call.returned.spec)

    def _tensor(self, value: Value, look: Look, call: Call) -> Tensor:
        received = self._received.get(value)
        if received is None:
            return self._make(value, look)
        if call.checkpoint == "reentrant" and received.requires_grad:
            # A view with a graph: torch detaches what else a reentrant checkpoint returns without such an input.
            with torch.enable_grad():
                return received.view_as(received)
        return received


class _Absent:
    """In place of something that an earlier stage returned and that is no tensor. Using it is an error."""

    def __init__(self, module: str, kind: str) -> None:
        self.__dict__["_said"] = (
            f"{module} returned a {kind}, of which a later stage needs something: it can receive tensors alone; "
            "register its class with torch.utils._pytree, or cut elsewhere"
        )

    def _refuse(self, *_: object, **__: object) -> Any:
        raise UsageError(self.__dict__["_said"])

    __getattr__ = __getitem__ = __iter__ = __call__ = __bool__ = __len__ = __setattr__ = _refuse
