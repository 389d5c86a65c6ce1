"""Trace: every module call of one forward, in order, with its output and the sources of that output."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec

from pipeflow.stages.flow import Flow
from pipeflow.stages.identities import Identity
from pipeflow.stages.loss import Made
from pipeflow.stages.trees import flattened

Batch = tuple[tuple[Any, ...], dict[str, Any]]
"""The arguments of a module: positional ones and keywords."""


class Look(NamedTuple):
    """The properties of a tensor.

    Attributes:
        shape, stride, dtype, requires_grad: as in torch.
        sources: bits of the sources that flowed into it.
        storage: a number that stands for its memory.
        identity: how it was computed.
        value: the tensor itself if it is a mask or one whole number, known or guessed; else None.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    sources: int
    storage: int
    identity: Identity
    value: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Its size in bytes when it is sent."""
        return self.dtype.itemsize * int(torch.Size(self.shape).numel())

    @classmethod
    def of(cls, tensor: Tensor, flow: Flow) -> Look:
        """The shape, stride, dtype and sources of `tensor`."""
        stride = tensor.stride() if tensor.layout is torch.strided else ()
        shape, sources, storage = tuple(tensor.shape), flow.sources(tensor), flow.key(tensor)
        identity = flow.identities.of(tensor)
        value = tensor if flow.has_branches(tensor) else None
        return cls(shape, tuple(stride), tensor.dtype, tensor.requires_grad, sources, storage, identity, value)


class Unknown(NamedTuple):
    """A leaf that is neither a tensor nor a plain value. `kind` is the name of its class."""

    kind: str


PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.layout, slice, range)
Leaf = Look | Unknown | Any


class Returned(NamedTuple):
    """The output of a call: a tree whose leaves are Looks, plain values and Unknowns."""

    spec: TreeSpec
    leaves: list[Leaf]

    @classmethod
    def of(cls, output: object, flow: Flow) -> Returned:
        """Describes the output of a call."""
        leaves, spec = flattened(output)
        return cls.of_leaves(leaves, spec, flow)

    @classmethod
    def of_leaves(cls, leaves: Sequence[object], spec: TreeSpec, flow: Flow) -> Returned:
        """Describes a tree that is already flattened."""
        return cls(spec, [_leaf(leaf, flow) for leaf in leaves])

    @property
    def is_bare(self) -> bool:
        """True if it is a single leaf and not a tree."""
        return self.spec.is_leaf()

    def looks(self) -> dict[int, Look]:
        """The tensors among the leaves, by index."""
        return {index: leaf for index, leaf in enumerate(self.leaves) if isinstance(leaf, Look)}


def _leaf(leaf: object, flow: Flow) -> Leaf:
    if isinstance(leaf, Tensor):
        return Look.of(leaf, flow)
    return leaf if isinstance(leaf, PLAIN) else Unknown(type(leaf).__name__)


@dataclass(slots=True, eq=False)
class Call:
    """A call of a module.

    Attributes:
        index: index of the call in the trace.
        name: name of the module.
        turn: number of earlier calls of this module within the call `parent`.
        parent: index of the surrounding call.
        enter, exit: times of entry and exit, counted in entries and exits of all calls.
        checkpoint: the kind of activation checkpoint around it, "reentrant" or "plain"; None without one.
        function: name of the custom autograd.Function in whose forward it was made; None without one.
        keeps: name of an attribute of the module that this call, within a custom Function, set to another tensor.
        given: storages of its arguments.
        arguments: its arguments as they are after it, if `seen_by` or `writes` is not empty.
        writes: the leaves of its arguments that it writes to in place.
        seen_by: code that sees the call beside its caller: forward hooks, or a replacement of the module's forward.
        is_wrapped: True if the module's forward was replaced.
        returned: its output.
        turns: number of calls of each module within it.
    """

    index: int
    name: str
    turn: int
    parent: int
    enter: int
    checkpoint: str | None = None
    function: str | None = None
    keeps: str | None = None
    given: frozenset[int] = frozenset()
    exit: int = -1
    arguments: Returned | None = None
    writes: tuple[int, ...] = ()
    seen_by: frozenset[object] = frozenset()
    is_wrapped: bool = False
    returned: Returned | None = None
    turns: dict[str, int] = field(default_factory=dict)

    @property
    def looks(self) -> dict[int, Look]:
        """The tensors that it returned, by index of the leaf."""
        return {} if self.returned is None else self.returned.looks()

    @property
    def returns(self) -> frozenset[int]:
        """The storages of the tensors that it returned."""
        return frozenset(look.storage for look in self.looks.values())

    @property
    def storages(self) -> frozenset[int]:
        """The storages of its output and of its arguments."""
        given = [] if self.arguments is None else self.arguments.looks().values()
        return self.returns.union(look.storage for look in given)

    def look(self, leaf: int) -> Look:
        """A tensor that it returned, or, if `leaf` is negative, one of its arguments: -1 is the first one."""
        tree = self.returned if leaf >= 0 else self.arguments
        assert tree is not None
        return tree.looks()[leaf if leaf >= 0 else -1 - leaf]


class Leak(NamedTuple):
    """A tensor of storage `key` that was made inside call `maker` and read in call `reader` at time `clock`, although
    it was not returned; `sources` flowed into it.
    """

    maker: int
    reader: int
    clock: int
    key: int
    sources: int


@dataclass
class Trace:
    """The record of a forward. Call 0 is the call of the whole module.

    Attributes:
        calls: all calls, in order of entry.
        leaks: tensors that calls passed on outside their outputs.
        decided: calls that read a random number.
        guesses: calls that branched on a value that depends on parameters, with the first time that they did.
        loss: how the loss that the module returned is made; None if it returned none.
        writes: as in Identities.
        scalars: as `loss`, for each leaf of what the module returned, with None for leaves that are no scalar tensor.
    """

    calls: list[Call]
    leaks: list[Leak]
    decided: list[int]
    guesses: dict[int, int]
    loss: Made | None
    writes: dict[int, list[tuple[int, int]]]
    scalars: tuple[Made | None, ...] = ()

    @property
    def returned(self) -> Returned:
        """The output of the whole module's forward."""
        returned = self.calls[0].returned
        assert returned is not None
        return returned

    def is_within(self, inner: int, outer: int) -> bool:
        """Returns True if call `inner` is `outer` or happened inside it."""
        while inner > outer:
            inner = self.calls[inner].parent
        return inner == outer

    def look(self, call: int, leaf: int) -> Look:
        """A tensor that a call returned or was given; see `Call.look`."""
        return self.calls[call].look(leaf)

    def around(self, call: Call, until: int) -> Call:
        """The outermost call around `call`, or itself, that ended until a time."""
        while call.parent and self.calls[call.parent].exit <= until:
            call = self.calls[call.parent]
        return call

    def identity(self, look: Look, until: int) -> Identity:
        """How a tensor of a call was computed, with what was written to it until a time, the exit of a call."""
        made = [number for clock, number in self.writes.get(look.storage, []) if clock < until]
        return look.identity._replace(made=made[-1]) if made else look.identity

    def seen_in(self, outer: Call) -> list[Call]:
        """The calls within `outer`, including itself, that code beside their callers may see, such as hooks."""
        return [call for call in self.calls if call.seen_by and self.is_within(call.index, outer.index)]

    def seen_until(self, start: Call, by: Collection[object] | None = None) -> list[Call]:
        """The calls up to the end of `start` that code in `by` sees, or any code if it is None, in order of exit."""
        found = [call for call in self.calls if call.seen_by and call.exit <= start.exit]
        found = [call for call in found if by is None or not call.seen_by.isdisjoint(by)]
        return sorted(found, key=lambda call: call.exit)

    @property
    def keepers(self) -> list[tuple[str, str]]:
        """Modules within custom autograd.Functions that set an attribute to a tensor, and these attributes."""
        return [(call.name, call.keeps) for call in self.calls if call.keeps]

    @cached_property
    def collectors(self) -> frozenset[object]:
        """Code that may collect tensors from calls: it sees a call whose tensors are later read outside its output, or
        returned by a surrounding call.
        """
        leaked = {leak.key for leak in self.leaks}
        found: set[object] = set()
        for call in self.seen_in(self.calls[0]):
            wanted, outer = set(leaked), call
            while outer.index:
                outer = self.calls[outer.parent]
                wanted |= outer.returns
            if not call.storages.isdisjoint(wanted):
                found |= call.seen_by
        return frozenset(found)

    def calls_in_order(self) -> list[tuple[int, str, int]]:
        """Parent, name and turn of every call."""
        return [(call.parent, call.name, call.turn) for call in self.calls]
