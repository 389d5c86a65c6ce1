"""Trace: every module call of one forward, in order, with what it returned and where that came from."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves

from pipeflow.core.errors import UsageError
from pipeflow.stages.calls import watched
from pipeflow.stages.copies import Fakes
from pipeflow.stages.flow import Flow
from pipeflow.stages.loss import loss_in

Batch = tuple[tuple[Any, ...], dict[str, Any]]
"""What a module is called with: positional arguments and keywords."""


class Look(NamedTuple):
    """What a tensor looks like; `sources` flowed into it, and `storage` stands for its memory."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    sources: int
    storage: int

    @property
    def nbytes(self) -> int:
        """Its size when it is sent."""
        return self.dtype.itemsize * int(torch.Size(self.shape).numel())

    @classmethod
    def of(cls, tensor: Tensor, flow: Flow) -> Look:
        """What `tensor` looks like."""
        stride = tensor.stride() if tensor.layout is torch.strided else ()
        shape, sources, storage = tuple(tensor.shape), flow.sources(tensor), flow.key(tensor)
        return cls(shape, tuple(stride), tensor.dtype, tensor.requires_grad, sources, storage)


class Unknown(NamedTuple):
    """A leaf that is neither a tensor nor a plain value."""

    kind: str


PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.layout, slice, range)
Leaf = Look | Unknown | Any


class Returned(NamedTuple):
    """What a call returned: a tree, whose leaves are Looks, plain values and what is Unknown."""

    spec: TreeSpec
    leaves: list[Leaf]

    @classmethod
    def of(cls, output: object, flow: Flow) -> Returned:
        """Takes an output apart."""
        leaves, spec = tree_flatten(output)
        return cls(spec, [_leaf(leaf, flow) for leaf in leaves])

    @property
    def is_bare(self) -> bool:
        """Whether it is no tree but a leaf."""
        return self.spec.is_leaf()

    def looks(self) -> dict[int, Look]:
        """The tensors among the leaves."""
        return {index: leaf for index, leaf in enumerate(self.leaves) if isinstance(leaf, Look)}


def _leaf(leaf: object, flow: Flow) -> Leaf:
    if isinstance(leaf, Tensor):
        return Look.of(leaf, flow)
    return leaf if isinstance(leaf, PLAIN) else Unknown(type(leaf).__name__)


@dataclass(slots=True, eq=False)
class Call:
    """A call of a module: the `turn`-th one of this module within the call `parent`. `enter` and `exit` count entries
    and exits of all calls; `checkpoint` says in which kind of activation checkpoint it lies. `given` has the storages
    of its arguments. `seen_by` are others than its caller that see it: forward hooks, by their code, or what was put in
    the place of the module's forward, which `is_wrapped` tells. `arguments` are kept of such a call alone.
    """

    index: int
    name: str
    turn: int
    parent: int
    enter: int
    checkpoint: str | None = None
    given: frozenset[int] = frozenset()
    exit: int = -1
    arguments: Returned | None = None
    seen_by: frozenset[object] = frozenset()
    is_wrapped: bool = False
    returned: Returned | None = None
    turns: dict[str, int] = field(default_factory=dict)

    @property
    def looks(self) -> dict[int, Look]:
        """The tensors that it returned."""
        return {} if self.returned is None else self.returned.looks()

    @property
    def returns(self) -> frozenset[int]:
        """The storages of what it returned."""
        return frozenset(look.storage for look in self.looks.values())

    @property
    def storages(self) -> frozenset[int]:
        """The storages of what it returned and was given."""
        given = [] if self.arguments is None else self.arguments.looks().values()
        return self.returns.union(look.storage for look in given)

    def look(self, leaf: int) -> Look:
        """A tensor that it returned, or where `leaf` is below zero, one that it was given: -1 is the first one."""
        tree = self.returned if leaf >= 0 else self.arguments
        assert tree is not None
        return tree.looks()[leaf if leaf >= 0 else -1 - leaf]


class Leak(NamedTuple):
    """A tensor of storage `key` that was made inside call `maker` and read in call `reader` at `clock`, though it was
    not returned; `sources` flowed into it.
    """

    maker: int
    reader: int
    clock: int
    key: int
    sources: int


@dataclass
class Trace:
    """A forward. Call 0 is that of the whole module.

    Attributes:
        calls: in the order in which they were entered.
        leaks: tensors that calls handed on beside their outputs.
        decided: the calls that read a number that was drawn at random.
        guesses: the calls that decided by a value that depends on parameters, and when they did first.
        targets: how many targets count, of each loss that counts its targets.
        makes_loss: whether there is a loss in what the module returned.
    """

    calls: list[Call]
    leaks: list[Leak]
    decided: list[int]
    guesses: dict[int, int]
    targets: list[int]
    makes_loss: bool

    @property
    def returned(self) -> Returned:
        """What the module returned."""
        returned = self.calls[0].returned
        assert returned is not None
        return returned

    def is_within(self, inner: int, outer: int) -> bool:
        """Whether call `inner` is `outer` or happened inside it."""
        while inner > outer:
            inner = self.calls[inner].parent
        return inner == outer

    def look(self, call: int, leaf: int) -> Look:
        """A tensor that a call returned, or was given; see `Call.look`."""
        return self.calls[call].look(leaf)

    def seen_in(self, outer: Call) -> list[Call]:
        """The calls within `outer`, itself among them, that others than their callers may see, as their hooks do."""
        return [call for call in self.calls if call.seen_by and self.is_within(call.index, outer.index)]

    def collected(self, start: Call) -> list[Call]:
        """The calls up to the end of `start` that collectors see, in the order of their ends."""
        found = [call for call in self.calls if call.exit <= start.exit]
        found = [call for call in found if not call.seen_by.isdisjoint(self.collectors)]
        return sorted(found, key=lambda call: call.exit)

    @cached_property
    def collectors(self) -> frozenset[object]:
        """Who may collect tensors from calls: those who see one whose tensors are read later beside what is returned,
        or are returned by a call around it.
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
        """Every call by its parent, its name and its turn."""
        return [(call.parent, call.name, call.turn) for call in self.calls]


class Recorder:
    """Records calls while they run."""

    def __init__(self, flow: Flow, modules: dict[str, nn.Module]) -> None:
        self.flow = flow
        self._modules = modules
        self.calls = [Call(0, "", 0, -1, 0)]
        self._current = 0

    def called(self, name: str, call: Callable[..., Any], arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """Records one call, and runs it."""
        outer = self.calls[self._current]
        turn = outer.turns.get(name, 0)
        outer.turns[name] = turn + 1
        made = Call(len(self.calls), name, turn, outer.index, self._tick(), _checkpoint())
        module = self._modules[name]
        seers, wrapper = [*module._forward_hooks.values()], vars(module).get("forward")
        made.is_wrapped = wrapper is not None
        made.seen_by = frozenset(_code(each) for each in (*seers, wrapper) if each is not None)
        if made.seen_by:
            made.arguments = Returned.of((arguments, keywords), self.flow)
        given = tree_leaves((arguments, keywords))
        made.given = frozenset(self.flow.key(tensor) for tensor in given if isinstance(tensor, Tensor))
        self.calls.append(made)
        self._enter(made.index)
        output = call(*arguments, **keywords)
        self._enter(outer.index)
        made.exit, made.returned = self._tick(), Returned.of(output, self.flow)
        return output

    def end(self, output: object) -> None:
        """After the call of the whole module."""
        self.calls[0].exit, self.calls[0].returned = self._tick(), Returned.of(output, self.flow)

    @property
    def current(self) -> str:
        """The module whose call runs."""
        return self.calls[self._current].name

    def _enter(self, index: int) -> None:
        self._current = self.flow.where = index

    def _tick(self) -> int:
        self.flow.clock += 1
        return self.flow.clock


def record(fakes: Fakes, batch: Batch, *, draw: float = 0.0, guess: bool = True) -> Trace:
    """Runs the forward of `fakes` on a batch, whose tensors must not be needed elsewhere. `draw` and `guess` are those
    of Flow. With the guess that is not the usual one, a forward that fails is recorded up to there.
    """
    flow = Flow(fakes.mode, fakes.of_buffers, draw=draw, guess=guess)
    bits = fakes.sources()
    for name, tensor in fakes.tensors().items():
        flow.mark(tensor, bits[name])
    modules = {name: module for name, module in fakes.module.named_modules() if name}
    recorder, output = Recorder(flow, modules), None
    try:
        with explained(recorder), watched(modules, recorder), torch.enable_grad(), flow:
            output = fakes.module(*batch[0], **batch[1])
    except UsageError:
        if guess:
            raise
    recorder.end(output)
    leaks, makes_loss = _leaks(recorder.calls, flow), loss_in(output) is not None
    return Trace(recorder.calls, leaks, flow.decided, flow.guesses, flow.targets, makes_loss)


class Located(Protocol):
    """Knows in which module a forward is, and what flows there."""

    flow: Flow

    @property
    def current(self) -> str: ...


class explained:  # noqa: N801  # used like a function, as contextlib's are
    """Explains what goes wrong in a forward on fake tensors, and says in which module."""

    def __init__(self, where: Located) -> None:
        self._where = where

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        where = self._where.current or "the module's own forward"
        if isinstance(error, UsageError):
            raise UsageError(f"{where}: {error}") from error
        unknown = isinstance(error, DataDependentOutputException | DynamicOutputShapeException)
        if unknown or (isinstance(error, Exception) and self._where.flow.guesses):
            raise UsageError(decides(where, f" ({error})")) from error
        if isinstance(error, Exception):
            error.add_note(f"raised in {where}, while the module's forward was traced on the example batch")


def decides(where: str, how: str = "") -> str:
    """An error about a forward that cannot be known."""
    return (
        f"{where} decides by the values of a tensor that depends on parameters{how}, so what it does is not known "
        "before it runs: the module cannot be cut there"
    )


def _code(function: object) -> object:
    """What is the same for all functions that one place in a program makes."""
    return getattr(function, "__code__", type(function))


def _leaks(calls: list[Call], flow: Flow) -> list[Leak]:
    """Tensors that calls hand on beside what they return."""
    returned = [{look.storage for look in call.looks.values()} for call in calls]
    found = []
    for (key, reader), clock in flow.uses.items():
        maker = flow.born[key]
        inside = _ancestors(calls, reader)
        while maker not in inside:
            if key not in returned[maker]:
                found.append(Leak(maker, reader, clock, key, flow.sources_of(key)))
            maker = calls[maker].parent
    return found


def _ancestors(calls: list[Call], index: int) -> set[int]:
    found = set()
    while index >= 0:
        found.add(index)
        index = calls[index].parent
    return found


def _checkpoint() -> str | None:
    """The kind of activation checkpoint within which this is called: "reentrant" or "plain"."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code is not record.__code__:
        if frame.f_code.co_filename == torch.utils.checkpoint.__file__:
            inside = frame.f_code.co_name == "forward"
            outer = frame.f_back
            while outer is not None and not inside and outer.f_code.co_filename == frame.f_code.co_filename:
                inside, outer = outer.f_code.co_name == "forward", outer.f_back
            return "reentrant" if inside else "plain"
        frame = frame.f_back  # type: ignore[assignment]  # None at the outermost one
    return None
