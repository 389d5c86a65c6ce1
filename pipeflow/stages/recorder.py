"""Recorder: runs a forward on fake tensors and records it as a Trace. Must not contain: what a trace is asked."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from pipeflow.core.errors import UsageError
from pipeflow.stages.call_stack import surroundings
from pipeflow.stages.calls import watched
from pipeflow.stages.copies import Fakes
from pipeflow.stages.flow import LEAST, Flow
from pipeflow.stages.loss import Made, loss_in
from pipeflow.stages.reductions import Reductions
from pipeflow.stages.trace import Batch, Call, Leak, Returned, Trace
from pipeflow.stages.trees import flattened

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
        made.writes = tuple(index for index, key in given.items() if written[key] > before[key])
        if made.seen_by or made.writes:
            made.arguments = Returned.of_leaves(leaves, spec, self.flow)
        self._end(made, output)
        return output

    def end(self, output: object) -> None:
        """Ends the record after the call of the whole module."""
        self._end(self.calls[0], output)

    def _end(self, call: Call, output: object) -> None:
        call.exit, call.returned = self._tick(), Returned.of(output, self.flow)

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
    flow = Flow(fakes.mode, fakes.of_buffers, draw=draw, guess=guess)
    bits = fakes.sources()
    for name, tensor in fakes.tensors().items():
        flow.give(tensor, bits[name])
    flow.reductions = notes = Reductions(flow.key, flow.is_known)
    notes.give(flattened(batch)[0])
    modules = {name: module for name, module in fakes.module.named_modules() if name}
    recorder, output = Recorder(flow, modules), None
    try:
        with explained(recorder), watched(modules, recorder), torch.enable_grad(), flow, within(flow):
            output = fakes.module(*batch[0], **batch[1])
    except UsageError:
        if guess:
            raise
    recorder.end(output)
    leaks, loss = _leaks(recorder.calls, flow), loss_in(output)

    def made(leaf: object) -> Made | None:
        if not isinstance(leaf, Tensor) or leaf.dim():
            return None
        return Made(notes.terms(leaf), notes.targets, notes.read)

    scalars = tuple(made(leaf) for leaf in flattened(output)[0])
    return Trace(recorder.calls, leaks, flow.decided, flow.guesses, made(loss), flow.identities.writes, scalars)


class Located(Protocol):
    """Knows in which module a forward is, and its Flow."""

    flow: Flow

    @property
    def current(self) -> str: ...


class explained:  # noqa: N801  # used like a function, as contextlib's are
    """Context manager that adds the name of the module to errors of a forward on fake tensors, and explains them."""

    def __init__(self, where: Located) -> None:
        self._where = where

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        where = self._where.current or "the module's own forward"
        if isinstance(error, UsageError):
            raise UsageError(f"{where}: {error}") from error
        unknown = isinstance(error, DataDependentOutputException | DynamicOutputShapeException)
        unknown = unknown or (isinstance(error, RuntimeError) and "data is not allocated" in str(error))  # of a kernel
        if unknown or (isinstance(error, Exception) and self._where.flow.guesses):
            raise UsageError(decides(where, f" ({str(error).partition(chr(10))[0]})")) from error
        if isinstance(error, Exception):
            error.add_note(f"raised in {where}, while the module's forward was traced on the example batch")


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
