"""Trace: every module call of one forward, in order, with its output and the sources of that output. A Recorder runs
the forward on fake tensors and records it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, is_dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pipeflow.core.errors import UsageError
from pipeflow.engine.stages.absent import NO_DATA
from pipeflow.engine.stages.calls import surroundings, watched
from pipeflow.engine.stages.copies import Fakes
from pipeflow.engine.stages.criterion import loss_in
from pipeflow.engine.stages.flow import LEAST, Flow, Identity
from pipeflow.engine.stages.module_state import held_by
from pipeflow.engine.stages.tape import Recorded, upstream
from pipeflow.engine.torch_private.modes import DataDependentOutputException, DynamicOutputShapeException
from pipeflow.engine.torch_private.trees import TreeSpec, register_pytree_node, tree_flatten, tree_leaves

Batch = tuple[tuple[Any, ...], dict[str, Any]]
"""The arguments of a module: positional ones and keywords."""


def flattened(tree: object) -> tuple[list[Any], TreeSpec]:
    """The leaves and the structure of a tree. If torch's pytrees do not know a dataclass with tensors, it is
    registered there, with its attributes as children. All of torch's functions for trees then treat it as a node.
    """
    leaves, spec = tree_flatten(tree)
    while kinds := {type(leaf) for leaf in leaves if is_dataclass(leaf) and _holds_tensors(leaf)}:
        for kind in kinds:
            _register(kind)
        leaves, spec = tree_flatten(tree)
    return leaves, spec


def _holds_tensors(leaf: object) -> bool:
    inner = tree_leaves(list(getattr(leaf, "__dict__", {}).values()))
    return any(isinstance(each, Tensor) or (is_dataclass(each) and _holds_tensors(each)) for each in inner)


def _register(kind: type) -> None:
    def flatten(node: Any) -> tuple[list[Any], Any]:
        return list(vars(node).values()), tuple(vars(node))

    def unflatten(values: Any, names: Any) -> Any:
        node: Any = object.__new__(kind)
        vars(node).update(zip(names, values, strict=True))
        return node

    register_pytree_node(kind, flatten, unflatten)


class Look(NamedTuple):
    """The properties of a tensor.

    Attributes:
        shape, stride, dtype, requires_grad: as in torch.
        sources: bits of the sources that flowed into it.
        storage: a number that stands for its memory.
        identity: how it was computed.
        value: the tensor itself if a forward may branch on it, see `Flow.has_branches`; else None.
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


PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.layout, slice, range)
Leaf = Look | type | Any
"""What is known of a leaf of an output: a tensor's Look, a plain value itself, and of another object its class."""


class Returned(NamedTuple):
    """The output of a call: a tree of Leaves."""

    spec: TreeSpec
    leaves: list[Leaf]

    @classmethod
    def of(cls, leaves: Sequence[object], spec: TreeSpec, flow: Flow) -> Returned:
        """Describes a tree that is flattened."""
        return cls(spec, [_leaf(leaf, flow) for leaf in leaves])

    def looks(self) -> dict[int, Look]:
        """The tensors among the leaves, by index."""
        return {index: leaf for index, leaf in enumerate(self.leaves) if isinstance(leaf, Look)}


def _leaf(leaf: object, flow: Flow) -> Leaf:
    if isinstance(leaf, Tensor):
        return Look.of(leaf, flow)
    return leaf if isinstance(leaf, PLAIN) else type(leaf)


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
        num_given: number of leaves of its arguments.
        passes: the leaves of its output that are leaves of its arguments, with these.
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
    num_given: int = 0
    passes: dict[int, int] = field(default_factory=dict)
    turns: dict[str, int] = field(default_factory=dict)

    @property
    def looks(self) -> dict[int, Look]:
        """The tensors that it returned, by index of the leaf."""
        return {} if self.returned is None else self.returned.looks()

    @property
    def tells(self) -> bool:
        """True if there are plain values in its output."""
        return self.returned is not None and any(isinstance(leaf, PLAIN) for leaf in self.returned.leaves)

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


@dataclass(eq=False)
class Trace:
    """The record of a forward. Call 0 is the call of the whole module.

    Attributes:
        calls: all calls, in order of entry.
        leaks: tensors that calls passed on outside their outputs.
        decided: calls that read a random number.
        guesses: calls that branched on a value that depends on parameters, with the first time that they did.
        loss: how the loss that the module returned was computed; None if it returned none.
        writes: as in Identities.
        kept: names of attributes in which the forward keeps tensors until the next one.
        scalars: as `loss`, for each leaf of what the module returned, with None for leaves that are no scalar tensor.
    """

    calls: list[Call]
    leaks: list[Leak]
    decided: list[int]
    guesses: dict[int, int]
    loss: Recorded | None
    writes: dict[int, list[tuple[int, int]]]
    scalars: tuple[Recorded | None, ...] = ()
    kept: tuple[str, ...] = ()

    @property
    def returned(self) -> Returned:
        """The output of the whole module's forward."""
        returned = self.calls[0].returned
        assert returned is not None
        return returned

    def seal(self, blocks: Collection[str]) -> None:
        """Forgets how the outputs of blocks were computed, so that how scalars were is read from these outputs on."""
        storages = {look.storage for call in self.calls if call.name in blocks for look in call.looks.values()}
        for scalar in (self.loss, *self.scalars):
            for node in () if scalar is None else upstream(scalar.node):
                if node.storage in storages and node.shape and not node.is_known:
                    node.seal()

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


Within = Callable[[Flow], AbstractContextManager[Any]]
"""Makes the context of a forward that runs under a Flow."""


class Recorder:
    """Records the calls of modules during one forward."""

    def __init__(self, flow: Flow, modules: dict[str, nn.Module]) -> None:
        self.flow = flow
        self._modules = modules
        self.calls = [Call(0, "", 0, -1, 0)]
        self._current = 0

    def called(self, name: str, call: Callable[..., Any], arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """Records a call and runs it."""
        outer = self.calls[self._current]
        turn = outer.turns.get(name, 0)
        outer.turns[name] = turn + 1
        made = Call(len(self.calls), name, turn, outer.index, self._tick(), *surroundings(record.__code__))
        module = self._modules[name]
        seers, wrapper = [*module._forward_hooks.values()], vars(module).get("forward")
        made.is_wrapped = wrapper is not None
        made.seen_by = frozenset(_code(each) for each in (*seers, wrapper) if each is not None)
        leaves, spec = flattened((arguments, keywords))
        given = {index: self.flow.key(leaf) for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}
        made.num_given = len(leaves)
        made.given, written = frozenset(given.values()), self.flow.written
        before = {key: written[key] for key in given.values()}
        self.calls.append(made)
        kept = dict(vars(module)) if made.function else {}
        self._enter(made.index)
        output = call(*arguments, **keywords)
        self._enter(outer.index)
        if made.function:
            own = vars(module).items()
            made.keeps = next((at for at, each in own if isinstance(each, Tensor) and each is not kept.get(at)), None)
        at = {id(leaf): index for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}
        returned, its_spec = flattened(output)
        made.passes = {index: at[id(leaf)] for index, leaf in enumerate(returned) if id(leaf) in at}
        made.writes = tuple(index for index, key in given.items() if written[key] > before[key])
        if made.seen_by or made.writes:
            made.arguments = Returned.of(leaves, spec, self.flow)
        made.exit, made.returned = self._tick(), Returned.of(returned, its_spec, self.flow)
        return output

    def end(self, output: object) -> None:
        """Ends the record after the call of the whole module."""
        self.calls[0].exit, self.calls[0].returned = self._tick(), Returned.of(*flattened(output), self.flow)

    @property
    def current(self) -> str:
        """The name of the module whose call runs."""
        return self.calls[self._current].name

    def _enter(self, index: int) -> None:
        self._current = self.flow.where = index

    def _tick(self) -> int:
        self.flow.clock += 1
        return self.flow.clock


def record(
    fakes: Fakes, batch: Batch, *, draw: float = LEAST, guess: bool = True, within: Within = nullcontext
) -> Trace:
    """Runs the forward of `fakes` on a batch, whose tensors may be modified, in the context that `within` makes.

    `draw` and `guess` are the arguments of Flow. With `guess=False`, a forward that raises UsageError is recorded up to
    that point.
    """
    flow = fakes.flow(draw=draw, guess=guess)
    tape = flow.recorded(fakes.module.named_buffers())
    tape.give(flattened(batch)[0])
    modules = {name: module for name, module in fakes.module.named_modules() if name}
    recorder, output, held = Recorder(flow, modules), None, held_by(fakes.module)
    try:
        with explained(flow, lambda: recorder.current), watched(modules, recorder.called), flow, within(flow):
            output = fakes.module(*batch[0], **batch[1])
    except UsageError:
        if guess:
            raise
    recorder.end(output)
    leaks, loss = _leaks(recorder.calls, flow), loss_in(output)

    def made(leaf: object) -> Recorded | None:
        return Recorded(tape.of(leaf), tape.read) if isinstance(leaf, Tensor) and not leaf.dim() else None

    scalars = tuple(made(leaf) for leaf in flattened(output)[0])
    kept = [name for (name, place), each in held_by(fakes.module).items() if held.get((name, place)) is not each]
    writes = flow.identities.writes
    return Trace(recorder.calls, leaks, flow.decided, flow.guesses, made(loss), writes, scalars, tuple(kept))


@contextmanager
def explained(flow: Flow, current: Callable[[], str]) -> Iterator[None]:
    """A region for a forward on fake tensors, whose errors name the module that is called, `current`."""
    try:
        yield
    except Exception as error:
        where = current() or "the module's own forward"
        if isinstance(error, UsageError):
            raise UsageError(f"{where}: {error}") from error
        unknown = isinstance(error, DataDependentOutputException | DynamicOutputShapeException)
        unknown = unknown or (isinstance(error, RuntimeError) and NO_DATA in str(error))  # of a kernel
        if unknown or flow.guesses:
            raise UsageError(decides(where, f" ({str(error).partition(chr(10))[0]})")) from error
        error.add_note(f"raised in {where}, while the module's forward was traced on the example batch")
        raise


def decides(where: str, how: str = "") -> str:
    """The text of an error about a forward that cannot be known in advance."""
    return (
        f"{where} branches on the values of a tensor that depends on parameters{how}, so its calls are not known "
        "before it runs: the module cannot be cut there"
    )


def _code(function: object) -> object:
    """A key that is the same for all functions made by one place in a program."""
    return getattr(function, "__code__", type(function))


def _leaks(calls: list[Call], flow: Flow) -> list[Leak]:
    """Tensors that calls pass on outside their outputs."""
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
