"""The operations of actions that save memory: recomputation, offload and load; and the forwards and backwards of the
microbatches that they serve. Must not contain: the tensors that are saved, which `saved` has.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from pipeflow.core.dataflow import DATAFLOW, Stream
from pipeflow.engine.parallel.transport.protocol import Work
from pipeflow.engine.runtime.devices import side_stream
from pipeflow.engine.runtime.program.microbatches import Microbatch
from pipeflow.engine.runtime.program.operations import Awaited, Beside
from pipeflow.engine.runtime.program.saved import Holder, Saved, storages
from pipeflow.engine.tensor.random import replay_of
from pipeflow.engine.torch_private.trees import tree_flatten, tree_leaves, tree_unflatten

# Theory of operation
#
# The backward of a stage begins at its output and ends at its inputs, and autograd keeps both until then: the graph has
# a reference to each leaf. So it is not enough to take what operators saved out of the graph (`saved`). The input must
# go too, or offload and recomputation would keep it on the device. Therefore a leaf gets an anchor, an expanded scalar
# that has the shape of the input and no memory; `_Enter` gives the stage the input and takes the gradient to the
# anchor.
#
# A recomputation calls the stage again with the same input, random numbers and keywords, and with the buffers and
# attributes that its module had before (`module_state`). Then these are again what later forwards made of them. Only
# what it saves is kept; its output is thrown away. A copy runs on a stream of its own (on CPUs: on a thread), so that
# computations go on. It first waits for what made the tensors; the action that uses them awaits the copy, as `compile`
# arranges.


@dataclass(eq=False)
class HeldMicrobatch(Microbatch):
    """A microbatch whose saved tensors are computed again before its backward, or moved to the host.

    Attributes:
        saved: what its forward saved.
        drops: whether the forward keeps its input alone, since it is computed again.
    """

    _: KW_ONLY
    saved: Saved
    drops: bool
    _again: Callable[[], None] | None = field(default=None, init=False)

    def forward(self) -> None:
        stage, saved = self.stage, self.saved
        stage.deferral.active = self.defers
        arguments, keywords = self.arguments(), stage.keywords[self.index]
        given = (each for each in tree_leaves((arguments, keywords)) if isinstance(each, Tensor))
        buffers = storages(stage.state.buffers)
        batch = storages(chain(stage.state.parameters, given)) - storages(self.leaves)  # which the step has anyway
        arguments = self._entered(arguments)
        saved.forget()
        if self.drops:
            self._again = self._repetition(arguments, batch)
        with saved.catching(batch, buffers, drop=self.drops):
            output = self.call(*arguments, **keywords)
        stage.state.ran()
        self.keep(output)

    def recompute(self) -> None:
        """C: computes the forward again, and keeps what it saved the first time."""
        assert self._again is not None  # a sound schedule has the forward before
        self._again()
        self._again = None

    def _backward(self, *, defers: bool) -> None:
        self.saved.forget()  # the backward frees them
        super()._backward(defers=defers)

    def _entered(self, arguments: tuple[object, ...]) -> tuple[object, ...]:
        """The arguments with inputs that only the graph holds. Leaves, which autograd keeps until the backward, become
        anchors.
        """
        inputs: dict[int, Tensor] = {}
        for position, leaf in enumerate(self.leaves):
            if leaf.requires_grad:
                anchor = leaf.new_zeros(()).expand(leaf.shape).detach().requires_grad_()
                inputs[id(leaf)] = _Enter.apply(anchor, leaf.detach())  # type: ignore[no-untyped-call]  # as torch has it
                self.leaves[position] = anchor
        leaves, spec = tree_flatten(arguments)
        return tuple(tree_unflatten([inputs.get(id(leaf), leaf) for leaf in leaves], spec))

    def _repetition(self, arguments: tuple[object, ...], batch: frozenset[int]) -> Callable[[], None]:
        """Calls the stage again with the same input, random numbers and state of its module, which is afterwards as if
        it had not run. Its input can be moved in the meantime.
        """
        stage, saved, before = self.stage, self.saved, self.stage.state.now()
        replayed = replay_of(f"stage {stage.index}", self.buffers.device)
        leaves, spec = tree_flatten(arguments)
        held = [Holder(leaf) if isinstance(leaf, Tensor) and leaf.requires_grad else leaf for leaf in leaves]
        saved.holders += [leaf for leaf in held if isinstance(leaf, Holder)]

        def again() -> None:
            inputs = [leaf.unpacked().requires_grad_() if isinstance(leaf, Holder) else leaf for leaf in held]
            arguments, keywords = tree_unflatten(inputs, spec), stage.keywords[self.index]
            stage.deferral.active = self.defers
            if saved.dropped:
                with stage.state.as_it_is(before) as now:
                    with replayed():
                        saved.fill(batch, partial(self.call, *arguments, **keywords))
                    saved.keep(storages(now.written()))

        return again


class _Enter(torch.autograd.Function):
    """Gives a stage its input and takes its gradient to an anchor, which has the input's shape but not its memory."""

    @staticmethod
    def forward(_: Any, anchor: Tensor, tensor: Tensor) -> Tensor:  # only the backward uses it
        return tensor.detach()

    @staticmethod
    def backward(_: Any, *gradients: Any) -> Any:
        return gradients[0], None


Move = Callable[[torch.cuda.Stream | None], list[Tensor]]
"""Moves what a forward saved, on a GPU on that stream. Returns the tensors that the copies read."""


@dataclass(eq=False)
class MemoryCopy(Beside):
    """O or L: a copy to the host, or back, after the actions of `after`: on a GPU on a stream of its own, on a CPU on a
    thread of its own.

    The host of a GPU runs ahead of it. So memory that a copy reads must be kept until the computations that could
    overwrite it come after the copy. That is so when their stream waits for the copy: when the rank issues its next
    offload, or at the end of the step. A schedule of `with_offload` has its next offload where this copy has ended, so
    this wait takes no time, and the host never waits.

    Attributes:
        action: the action.
        move: makes the copy.
        device: device of the rank.
        thread: thread that copies on a CPU.
        sources: the rank's offloads whose memory is not freed yet, in order.
    """

    move: Move
    device: torch.device
    thread: ThreadPoolExecutor
    sources: deque[MemoryCopy]
    held: list[Tensor] = field(default_factory=list, init=False)
    copied: torch.cuda.Event = field(init=False)  # on a GPU

    def begin(self) -> list[Work]:
        return self._on_gpu() if self.device.type == "cuda" else [Awaited(self.thread.submit(self._run).result)]

    def end(self) -> None:
        """Makes the current stream wait for the copy, and frees what it has read."""
        super().end()
        self.held = []

    def _on_gpu(self) -> list[Work]:
        stream = DATAFLOW[self.action.kind].stream
        while self.sources and (stream is Stream.OFFLOAD or self.sources[0].is_done):
            self.sources.popleft().end()
        side = side_stream(self.device, stream)
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(side):
            for work in (work for each in self.after for work in each.works):
                work.wait()
        self.held = self.move(side)
        if stream is Stream.OFFLOAD:
            self.sources.append(self)
        self.copied = side.record_event()
        return [Awaited(lambda: torch.cuda.current_stream().wait_event(self.copied))]

    @property
    def is_done(self) -> bool:
        """Whether a copy on a GPU has ended. The host does not wait."""
        return not self.works or bool(self.copied.query())

    def _run(self) -> None:
        for each in self.after:
            each.end()
        with torch.no_grad():
            self.move(None)
