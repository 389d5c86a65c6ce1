"""The operations of actions that save memory: recomputation, offload and load; and the forwards and backwards of the
microbatches that they serve. Must not contain: the tensors that are saved, which `saved` has.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from pipeflow.core.action import Action
from pipeflow.core.dataflow import DATAFLOW, Stream
from pipeflow.parallel.transport.work import Work
from pipeflow.runtime.program.operations import Beside, Compute, Forward, Operation
from pipeflow.runtime.program.payload import BackwardState
from pipeflow.runtime.program.saved import Holder, Saved, storages
from pipeflow.tensor.recompute import replay_of

# Theory of operation
#
# The backward of a stage begins at its output and ends at its inputs, and autograd keeps both until then: the graph has
# a reference to each leaf. So it is not enough to take what operators saved out of the graph (`saved`). The input must
# go too, or offload and recomputation would keep it on the device. Therefore a leaf gets an anchor, an expanded scalar
# that has the shape of the input and no memory; `_Enter` gives the stage the input and takes the gradient to the
# anchor.
#
# A recomputation calls the stage again with the same input, random numbers and keywords. Only what it saves is kept;
# its output is thrown away. A copy runs on a stream of its own (on CPUs: on a thread), so that computations go on. It
# first waits for what made the tensors; the action that uses them awaits the copy, as `compile` arranges.


class Memory:
    """What one forward keeps, if it is computed again or moved to the host before its backward.

    Attributes:
        state: the state that the forward leaves to its backward.
        drops: whether the forward keeps its input alone, since it is computed again.
        saved: what it saved.
        again: calls the stage again; None before the forward and after the recomputation.
    """

    def __init__(self, stage: int, state: BackwardState, *, drops: bool) -> None:
        self.state = state
        self.drops = drops
        self.saved = Saved(stage)
        self.again: Callable[[], None] | None = None


class HeldForward(Forward):
    """F of a microbatch whose saved tensors are computed again later, or moved to the host."""

    __slots__ = ("device", "memory")

    def __init__(self, forward: Forward, memory: Memory, device: torch.device) -> None:
        super().__init__(forward.action, forward.stage, forward.source, forward.sink, defers=forward.defers)
        self.memory = memory
        self.device = device

    def __call__(self) -> None:
        stage, saved, leaves = self.stage, self.memory.saved, self.memory.state
        stage.deferral.active = self.defers
        arguments, keywords = self.source(), stage.keywords[self.microbatch]
        given = (each for each in tree_leaves((arguments, keywords)) if isinstance(each, Tensor))
        weights = chain(stage.module.parameters(), stage.module.buffers())
        others = storages(chain(weights, given)) - storages(leaves.leaves)  # of the batch, which the step has anyway
        arguments = _entered(arguments, leaves)
        saved.forget()
        if self.memory.drops:
            self.memory.again = _Repeat(self, arguments, others)
        with saved.catching(others, drop=self.memory.drops):
            output = stage.call(*arguments, **keywords)
        self.sink(output)


class _Enter(torch.autograd.Function):
    """Gives a stage its input and takes its gradient to an anchor, which has the input's shape but not its memory."""

    @staticmethod
    def forward(_: Any, anchor: Tensor, tensor: Tensor) -> Tensor:  # only the backward uses it
        return tensor.detach()

    @staticmethod
    def backward(_: Any, *gradients: Any) -> Any:
        return gradients[0], None


def _entered(arguments: tuple[object, ...], state: BackwardState) -> tuple[object, ...]:
    """The arguments with inputs that only the graph holds. Leaves, which autograd keeps until the backward, become
    anchors.
    """
    inputs: dict[int, Tensor] = {}
    for position, leaf in enumerate(state.leaves):
        if leaf.requires_grad:
            anchor = leaf.new_zeros(()).expand(leaf.shape).detach().requires_grad_()
            inputs[id(leaf)] = _Enter.apply(anchor, leaf.detach())  # type: ignore[no-untyped-call]  # as torch has it
            state.leaves[position] = anchor
    leaves, spec = tree_flatten(arguments)
    return tuple(tree_unflatten([inputs.get(id(leaf), leaf) for leaf in leaves], spec))


class _Repeat:
    """Calls a stage again with the same input and the same random numbers. Its input can be moved in the meantime."""

    def __init__(self, forward: HeldForward, arguments: tuple[object, ...], others: frozenset[int]) -> None:
        self._forward, self._others = forward, others
        self._replayed = replay_of(f"stage {forward.action.stage}", forward.device)
        leaves, self._spec = tree_flatten(arguments)
        self._leaves = [Holder(leaf) if _wants(leaf) else leaf for leaf in leaves]
        forward.memory.saved.holders += [leaf for leaf in self._leaves if isinstance(leaf, Holder)]

    def __call__(self) -> None:
        forward, stage = self._forward, self._forward.stage
        leaves = [leaf.unpacked().requires_grad_() if isinstance(leaf, Holder) else leaf for leaf in self._leaves]
        arguments, keywords = tree_unflatten(leaves, self._spec), stage.keywords[forward.microbatch]
        stage.deferral.active = forward.defers
        if forward.memory.saved.dropped:
            with self._replayed(), forward.memory.saved.filling(self._others):
                stage.call(*arguments, **keywords)


def _wants(leaf: object) -> bool:
    return isinstance(leaf, Tensor) and leaf.requires_grad


class Recompute(Compute):
    """C: computes the forward again, and keeps what it saved the first time."""

    __slots__ = ("memory",)

    def __init__(self, action: Action, memory: Memory) -> None:
        super().__init__(action)
        self.memory = memory

    def __call__(self) -> None:
        assert self.memory.again is not None  # a sound schedule has the forward before
        self.memory.again()
        self.memory.again = None


class Leave(Operation):
    """Leaves what was saved to the backward that comes next, which frees it."""

    __slots__ = ("memory",)

    def __init__(self, memory: Memory) -> None:
        self.memory = memory

    def __call__(self) -> None:
        self.memory.saved.forget()


class Copy(Beside):
    """O or L: a copy to the host, or back, after the actions of `after`: on a GPU on a stream of its own, on a CPU on a
    thread of its own.
    """

    __slots__ = ("device", "move", "thread")

    def __init__(
        self,
        action: Action,
        move: Callable[[torch.cuda.Stream | None], None],
        device: torch.device,
        thread: ThreadPoolExecutor,
    ) -> None:
        super().__init__(action)
        self.move = move
        self.device = device
        self.thread = thread

    def begin(self) -> list[Work]:
        if self.device.type != "cuda":
            return [_Done(self.thread.submit(self._run))]
        side = _side_stream(self.device, DATAFLOW[self.action.kind].stream)
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(side):
            for each in self.after:
                each.end()
        self.move(side)
        return [_Recorded(side.record_event())]

    def _run(self) -> None:
        for each in self.after:
            each.end()
        with torch.no_grad():
            self.move(None)


@cache
def _side_stream(device: torch.device, _: Stream) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


class _Done:
    """The work of a copy on a thread."""

    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def wait(self) -> None:
        self._future.result()


class _Recorded:
    """The work of a copy on a stream: the current stream waits for it."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self._event)
