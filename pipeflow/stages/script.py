"""Script: what a stage does at which calls of the module's forward, and one run of it. Calls before the stage's cut are
replaced by what was received, or by tensors that nobody reads; calls whose outputs are sent are kept; after the last
one the forward is stopped. Where hooks of a replaced module collect what it returned, they see what was received. What
must not live here: how a script is found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_unflatten

from pipeflow.core.errors import UsageError
from pipeflow.stages.calls import watched
from pipeflow.stages.trace import Batch, Call, Look, Returned, Unknown


class Value(NamedTuple):
    """A tensor between stages: a leaf of what a call of a trace returned; or, below 0, of what it was given."""

    call: int
    leaf: int


@dataclass(slots=True)
class Node:
    """What to do at a call, and at those within it, by name and turn.

    Attributes:
        call: of the trace.
        is_replaced: whether the module is not called.
        replays: calls within it, itself among them, whose hooks have to see what they returned though it is replaced.
        keeps: the leaves of its output, and of its arguments, that are sent.
        ends: whether the forward is stopped after it.
        stops: whether the forward is stopped before it, since the last call lay within a checkpoint.
    """

    call: Call | None = None
    inner: dict[tuple[str, int], Node] = field(default_factory=dict)
    is_replaced: bool = False
    replays: tuple[Call, ...] = ()
    keeps: tuple[int, ...] = ()
    ends: bool = False
    stops: bool = False


@dataclass(slots=True)
class Script:
    """What a stage does.

    Attributes:
        root: of its nodes.
        names: the modules whose calls must be seen.
        replayed: those among them whose hooks are run without them.
        written: the values that are written to in place, which need memory of their own.
        writes_batch: whether the forward writes to the batch.
        wraps: whether it puts other forwards in the place of its modules', which a stopped one does not take back.
    """

    root: Node
    names: frozenset[str]
    replayed: frozenset[str] = frozenset()
    written: frozenset[Value] = frozenset()
    writes_batch: bool = False
    wraps: bool = False


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
        self._modules: Mapping[str, nn.Module] = {}
        self.replayed: list[Any] = []
        self.kept: dict[Value, Tensor] = {}

    def forward(self, module: nn.Module, modules: Mapping[str, nn.Module], batch: Batch) -> Any:
        """Runs `module` on a batch; what it returns, or None where it was stopped."""
        self._modules = modules
        with watched(modules, self, self._script.replayed), _own_forwards(module, self._script.wraps):
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
            return self._replaced(node)
        if node.stops:
            raise Stopped
        outer = self._node, self._turns
        self._node, self._turns = node, {}
        try:
            output = call(*arguments, **keywords)
        finally:
            self._node, self._turns = outer
        if node.keeps and node.call is not None:
            self._keep(node.call, node.keeps, output, (arguments, keywords))
        if node.ends:
            raise Stopped
        return output

    def _keep(self, call: Call, leaves: Sequence[int], output: object, given: object) -> None:
        found, returned = tree_leaves(output), call.returned
        if returned is None or len(found) != len(returned.leaves):
            raise UsageError(f"{call.name} returned another tree than when its forward was traced")
        arguments = tree_leaves(given) if min(leaves) < 0 else []
        for leaf in leaves:
            self.kept[Value(call.index, leaf)] = found[leaf] if leaf >= 0 else arguments[-1 - leaf]

    def _replaced(self, node: Node) -> Any:
        assert node.call is not None
        output = self._instead(node.call, node.call.returned)
        for call in node.replays:
            self._replay(call, output if call is node.call else self._instead(call, call.returned))
        return output

    def _instead(self, call: Call, tree: Returned | None) -> Any:
        """A tree like what a call returned, or was given, of what was received."""
        assert tree is not None
        leaves: list[Any] = []
        for index, leaf in enumerate(tree.leaves):
            if isinstance(leaf, Look):
                leaves.append(
                    self._tensor(Value(call.index, index if tree is call.returned else -1 - index), leaf, call)
                )
            else:
                leaves.append(_Absent(call.name, leaf.kind) if isinstance(leaf, Unknown) else leaf)
        return leaves[0] if tree.is_bare else tree_unflatten(leaves, tree.spec)

    def _replay(self, call: Call, output: Any) -> None:
        """Shows the hooks of a module, or what its forward was wrapped in, a call that is not made."""
        arguments, keywords = self._instead(call, call.arguments)
        self.replayed.append(output)
        self._modules[call.name]._call_impl(*arguments, **keywords)
        if self.replayed:
            self.replayed.clear()
            raise UsageError(
                f"something else was put in the place of the forward of {call.name}, so what others collect from its "
                "calls cannot be handed on: cut elsewhere"
            )

    def _tensor(self, value: Value, look: Look, call: Call) -> Tensor:
        received = self._received.get(value)
        if received is None:
            return self._make(value, look)
        if call.checkpoint == "reentrant" and received.requires_grad:
            # A view with a graph: torch detaches what else a reentrant checkpoint returns without such an input.
            with torch.enable_grad():
                return received.view_as(received)
        return received


@contextmanager
def _own_forwards(module: nn.Module, wraps: bool) -> Iterator[None]:
    """Takes away, at the end, what was put in the place of its modules' forwards meanwhile."""
    before = {each: vars(each).get("forward") for each in module.modules()} if wraps else {}
    try:
        yield
    finally:
        for each, own in before.items():
            if own is not None:
                vars(each)["forward"] = own
            else:
                vars(each).pop("forward", None)


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
