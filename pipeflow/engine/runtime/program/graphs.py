"""Graphs: the computations of a step that repeats, recorded once as CUDA graphs and replayed by later steps, for
`Pipeline(graph=True)`. Must not contain: transfers between ranks, sums and the agreement, which run as in any step.
"""

from __future__ import annotations

import gc
import logging
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from enum import Enum
from threading import Lock
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from pipeflow.core.action import Kind
from pipeflow.core.errors import UsageError
from pipeflow.engine.deferral.compile_backend import is_compiled
from pipeflow.engine.deferral.products import has_hooks
from pipeflow.engine.parallel.context import Context
from pipeflow.engine.parallel.failure import ActionError
from pipeflow.engine.parallel.transport.protocol import Tag, Work
from pipeflow.engine.runtime.gradients.step_end import Gradients
from pipeflow.engine.runtime.gradients.weights import gradient_dtype
from pipeflow.engine.runtime.program.microbatches import Microbatch
from pipeflow.engine.runtime.program.operations import Awaited, Doing, Operation, run
from pipeflow.engine.runtime.program.results import Results
from pipeflow.engine.runtime.program.slots import Buffers, Slot, Unused
from pipeflow.engine.runtime.program.wires import ActivationWire, Wire
from pipeflow.engine.runtime.stage import Stage
from pipeflow.engine.stages.module_state import counts_of, held_by
from pipeflow.engine.stages.stage import ModuleStage
from pipeflow.engine.torch_private.tensors import foreach_copy_, foreach_zero_
from pipeflow.engine.torch_private.trees import tree_flatten, tree_map, tree_unflatten

LOG = logging.getLogger("pipeflow")

# Theory of operation
#
# A graph has no arguments: it reads and writes the addresses that it was recorded with. So what a computation takes
# must lie where it lay then. The batch and the gradients with which backwards start are copied into tensors that stay.
# What is received comes into buffers that only such steps use. What a computation makes stays in the graphs' memory.
# Gradients of weights are added to tensors that stay; one that is None is that tensor again, filled with zeros.
#
# Recording runs nothing on the device. So all graphs are recorded before the step begins: its operations are called in
# their order, with transfers that go nowhere. In this order graphs share their memory, and later steps replay them.
# If it fails, no gradient, no weight, no buffer and no generator of random numbers has changed.

WARM = 3  # steps alike before one is recorded: then shapes are known on all wires, and the loss has been read
_LOOKS = 100  # kinds of steps that are counted
_TURN = Lock()  # torch records one graph at a time in a process

Capture = Callable[[Callable[[], None]], Callable[[], None]]
"""Records what a call launches, without running it, and returns a function that runs it."""


def capturing(device: torch.device) -> Capture:
    """What records graphs for a device, in one memory. Raises UsageError if the device has none."""
    if device.type != "cuda":
        raise UsageError(
            f"graph=True records CUDA graphs, but this rank computes on {device}: make the Pipeline without it"
        )
    pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(device)

    def capture(call: Callable[[], None]) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        with _TURN, torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            call()
        return graph.replay

    return capture


def require_recordable(context: Context, chunks: nn.Module, *, overlaps: bool, over_batch: bool) -> None:
    """Raises UsageError if the computations of a Pipeline cannot be recorded."""
    capturing(context.device)
    reasons = {
        "layers of tensor ranks communicate": context.tensor.size > 1,
        "attention over context ranks communicates": context.context.size > 1,
        "layers of expert ranks communicate": context.experts.size > 1,
        "overlap= runs computations on streams of its own": overlaps,
        'loss_over="batch" computes the loss outside of the stages': over_batch,
        "torch.compile was applied to modules": any(map(is_compiled, chunks.modules())),
    }
    for why, holds in reasons.items():
        if holds:
            raise UsageError(f"graph=True is not possible, because {why}: leave one of the two out")


class Phase(Enum):
    """What the computations of a step do."""

    PLAIN = "run"
    RECORD = "are recorded"
    REPLAY = "are replayed"


class Recorded(NamedTuple):
    """The graph of an action: what runs it, the addresses of what it takes from slots, and what it makes."""

    replay: Callable[[], None]
    takes: list[int | None]
    makes: list[tuple[list[Tensor], Any, tuple[bool, ...]]]  # per slot: tensors, tree, and which want a gradient


class _Nowhere:
    """In the place of a connection, and of what starts transfers, while graphs are recorded."""

    def wait(self, works: Iterable[Work]) -> None:
        """Returns at once, since nothing is under way."""

    def lost(self, error: BaseException) -> BaseException:
        """The error itself, which is about no connection."""
        return error

    def start(self, tensors: list[Tensor]) -> Work:
        """Starts nothing, and returns a work that is done."""
        return Awaited(int)


@dataclass(eq=False)
class Graphs:
    """The graphs of a program, recorded for the first kind of step that has come often enough.

    Attributes:
        context: that of the rank.
        stages, gradients, buffers, results, given: those of the program.
        operations, wires: those of the program, once it is compiled.
        look: what the shapes of the current step follow from.
        output: what the last stage returned, without values, and for which microbatch.
    """

    context: Context
    stages: Mapping[int, Stage]
    gradients: Gradients
    buffers: Buffers
    results: Results
    given: list[tuple[object, ...]]
    operations: Sequence[Operation] = ()
    wires: Sequence[Wire] = ()
    look: Hashable = None
    output: tuple[object, int] | None = None
    phase: Phase = Phase.PLAIN
    recorded: dict[tuple[Microbatch, Kind], Recorded] = field(default_factory=dict)
    _made_for: Hashable = None  # the look, and numbers in attributes of modules
    _addresses: list[int] = field(default_factory=list)  # of weights and buffers
    _counts: Counter[Hashable] = field(default_factory=Counter)  # of steps, by their look
    _before: dict[str, object] = field(default_factory=dict)  # what modules hold before the last step of WARM
    _changed: str = ""  # where they hold another object after it
    _batch: list[Tensor] = field(default_factory=list)
    _grads: dict[nn.Parameter, Tensor] = field(default_factory=dict)
    _places: list[dict[int, int]] = field(default_factory=list)  # of buffers, by wire
    _weights: list[nn.Parameter] = field(default_factory=list)  # that are trained
    _capture: Capture = field(default=lambda call: call)

    def begin(self) -> None:
        """Call when a step's batch is loaded and the gradients of earlier steps are set aside. Decides what its
        computations do, and records them if it is time.

        Raises UsageError if they cannot be recorded, or if somebody holds what they are to write.
        """
        before, self._addresses = self._addresses, self.gradients.addresses()
        if is_moved := before != self._addresses:
            self.recorded.clear()
            self._grads.clear()
        self.phase = Phase.PLAIN
        if len(self._counts) > _LOOKS:
            self._counts.clear()
        self._counts[self.look] += 1
        look = self.look, *(number for stage in self.stages.values() for number in counts_of(stage.module).items())
        is_time = self._made_for == look if self.recorded else self._counts[self.look] > WARM
        if self._changed and self._counts[self.look] > WARM:
            raise UsageError(
                f"forwards put another object into {self._changed}, which graphs would not do: let them write a tensor "
                "in place, or make the Pipeline without graph=True"
            )
        if is_moved or not is_time or not self._fits():
            self._before = self._holding() if is_moved or self._counts[self.look] == WARM else {}
            return
        weights = [weight.parameter for weight in self.gradients.weights if weight.parameter.requires_grad]
        if any(map(has_hooks, weights)):
            raise UsageError(
                "a weight has a hook on its gradient, which graphs do not call: remove it, or make the Pipeline "
                "without graph=True"
            )
        if not self.recorded:
            self._record(weights)
            self._made_for = look
        self._begin_replay()

    def end(self) -> None:
        """Call when all computations of a step have run. Sees what graphs would not do."""
        if before := self._before:
            now, self._before = self._holding(), {}
            self._changed = next((name for name in {**before, **now} if not _same(before.get(name), now.get(name))), "")

    def record(self, kind: Kind, call: Callable[[], None]) -> Callable[[], None]:
        """Records what an action launches, and returns what replays it. Gradients must be added to in place."""
        weights = [] if kind is Kind.F else self._weights
        missing = {weight for weight in weights if weight.grad is None}
        for weight in missing:
            weight.grad = torch.zeros_like(weight, dtype=gradient_dtype(weight))
        buffers = [buffer for stage in self.stages.values() for buffer in stage.module.buffers()]
        before = [(weight, weight.grad, weight.grad._version) for weight in weights if weight.grad is not None]
        versions = [buffer._version for buffer in buffers]
        replay = self._capture(call)
        for weight, gradient, version in before:
            if weight.grad is not gradient:
                raise UsageError(
                    f"the gradient of a weight of shape {tuple(weight.shape)} is not added up in one place, as a dense "
                    "one is"
                )
            if gradient._version != version:
                self._grads[weight] = gradient
            elif weight in missing:
                weight.grad = None
        written = [each for each, version in zip(buffers, versions, strict=True) if each._version != version]

        def replay_and_tell() -> None:
            replay()
            increment_version(written)

        return replay_and_tell if written else replay

    def _holding(self) -> dict[str, object]:
        """The numbers and tensors in attributes of modules, except their parameters, by their names."""
        found = dict[str, object]()
        for index, stage in self.stages.items():
            module = stage.module.root if isinstance(stage.module, ModuleStage) else stage.module
            held = {(f"{child}.{name}".lstrip("."), 0): number for (child, name), number in counts_of(module).items()}
            for (name, place), each in [*held.items(), *held_by(module).items()]:
                found[f"{name} of stage {index}" + f", at place {place}" * bool(place)] = each
        return found

    def _fits(self) -> bool:
        """Whether a step's graph does not depend on more than its look."""
        results = self.results
        wires = [wire for wire in self.wires if isinstance(wire, ActivationWire)]
        if results.keep_outputs or any(wire.expected is None for wire in wires):
            return False
        if any(each.requires_grad for each in self._loaded()[0]):
            return False
        if results.criterion is None:
            return True
        if results.settle is not None:
            if self.output is None:
                return False
            results.settle(*self.output)
        return results.weights.scaling is None and all(results.weights.parts)

    def _loaded(self) -> tuple[list[Tensor], list[Any], Any]:
        """The tensors of the batch; and all of it, as leaves and their tree."""
        tree = self.given, [stage.keywords for stage in self.stages.values()], self.results.labels
        leaves, spec = tree_flatten(tree)
        return [leaf for leaf in leaves if isinstance(leaf, Tensor)], leaves, spec

    def _record(self, weights: list[nn.Parameter]) -> None:
        """Records all computations in their order. Afterwards each value of the step is as it was before."""
        self.context.alarm.expect_slow()
        self._weights, self._capture, self.phase = weights, capturing(self.context.device), Phase.RECORD
        self.buffers.stay(again=False)
        held = self.buffers.held
        tensors, leaves, spec = self._loaded()
        self._batch = [each.clone() for each in tensors]  # each its own, also where two are one tensor in this step
        own = iter(self._batch)
        copied = tree_unflatten([next(own) if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec)
        self.given[:], keywords, self.results.labels = copied
        for stage, its in zip(self.stages.values(), keywords, strict=True):
            stage.keywords = its
        without = [weight for weight in weights if weight.grad is None]
        ends, nowhere = [(wire.starts, wire.link) for wire in self.wires], _Nowhere()
        torch.clear_autocast_cache()
        try:
            for wire in self.wires:
                wire.starts, wire.link = dict.fromkeys(Tag, nowhere.start), nowhere
                if isinstance(wire, ActivationWire):
                    wire.header.zero_()  # what is expected comes
            run([each for each in self.operations if each.doing not in (Doing.BEGIN, Doing.END, Doing.SWITCH)])
        except ActionError as error:
            cause = error.__cause__
            first = cause.__context__ or cause if cause else error  # torch raises another error when a recording ends
            raise UsageError(
                f"{error.action} cannot be recorded as a CUDA graph ({first}): make the Pipeline without graph=True, "
                "or change the stage so that nothing in it waits for the device or runs on the host"
            ) from cause
        finally:
            for weight in without:
                weight.grad = None
            torch.clear_autocast_cache()
            for wire, its in zip(self.wires, ends, strict=True):
                wire.starts, wire.link = its
        for stage in self.stages.values():
            stage.deferral.copies = None if stage.deferral.copies is None else {}
        self.results.losses = [None] * self.results.microbatches
        self._places = [wire.places.copy() for wire in self.wires]
        gc.collect()  # circles of objects hold nothing for long
        if self.buffers.held - held:
            raise UsageError(
                "something holds what a stage received, which graphs would overwrite: let it keep a copy, or make the "
                "Pipeline without graph=True"
            )
        LOG.info("recorded %d CUDA graphs", len(self.recorded))

    def _begin_replay(self) -> None:
        """Puts everything that graphs read where they read it."""
        self.phase = Phase.REPLAY
        self.buffers.stay(again=True)
        for wire, places in zip(self.wires, self._places, strict=True):
            wire.places.update(places)
        if self._batch:
            foreach_copy_(self._batch, self._loaded()[0])
        missing = list[Tensor]()
        for weight, own in self._grads.items():
            if weight.grad is None:
                self.gradients.keep_aside(weight, own)
                weight.grad = own
                missing.append(own)
            elif weight.grad.data_ptr() != own.data_ptr():
                own.copy_(weight.grad)
                weight.grad = own
        if missing:
            foreach_zero_(missing)


def _same(one: object, other: object) -> bool:
    return one is other or (type(one) is type(other) and not isinstance(one, Tensor) and one == other)


@dataclass(eq=False)
class GraphedMicrobatch(Microbatch):
    """A microbatch whose computations graphs may replay.

    Attributes:
        graphs: those of the program.
        loss: where its graph leaves the loss.
        begun: where the graph of its backward takes the gradients of the loss from.
    """

    _: KW_ONLY
    graphs: Graphs
    loss: Tensor | None = field(default=None, init=False)
    begun: list[Tensor] = field(default_factory=list, init=False)

    def forward(self) -> None:
        self._through(Kind.F, super().forward, self.inputs, list(self.outputs.values()))
        if self.graphs.phase is Phase.RECORD:
            self.loss = self.results.losses[self.index]
        elif self.graphs.phase is Phase.REPLAY and self.loss is not None:
            self.results.losses[self.index] = self.loss.clone()

    def keep(self, output: object) -> None:
        if not self.outputs:
            self.graphs.output = tree_map(_without_values, output), self.index
        super().keep(output)

    def backward(self) -> None:
        self._begin()
        self._through(Kind.B, super().backward, self.output_gradients, self.input_gradients)

    def backward_input(self) -> None:
        self._begin()
        self._through(Kind.I, super().backward_input, self.output_gradients, self.input_gradients)

    def backward_weight(self) -> None:
        self._through(Kind.W, super().backward_weight, (), ())

    def starts(self) -> list[Tensor]:
        return super().starts() if self.graphs.phase is Phase.PLAIN else [*self.begun]

    def _begin(self) -> None:
        """Puts the gradients with which a backward starts where its graph takes them."""
        if self.graphs.phase is Phase.RECORD:
            self.begun = [each.clone() for each in super().starts()]
        elif self.begun and self.graphs.phase is Phase.REPLAY:
            foreach_copy_(self.begun, super().starts())

    def _through(self, kind: Kind, call: Callable[[], None], takes: Sequence[Slot], makes: Sequence[Slot]) -> None:
        """Runs, records or replays a computation, which takes values from slots and puts others into slots."""
        graphs = self.graphs
        if graphs.phase is Phase.PLAIN:
            call()
            return
        taken = [tensor for slot in takes for tensor in slot.tensors]
        addresses = [None if isinstance(each, Unused) else each.data_ptr() for each in taken]
        if graphs.phase is Phase.RECORD:

            def computed() -> None:
                call()
                for slot in makes:  # graphs keep what they make, and so must not make a view of a buffer
                    slot.tensors = [each.clone() if self.buffers.have(each) else each for each in slot.tensors]

            is_nothing = kind is Kind.W and not self.deferred
            replay = _nothing if is_nothing else graphs.record(kind, computed)
            made = [([each.detach() for each in slot.tensors], slot.spec, slot.grads) for slot in makes]
            graphs.recorded[self, kind] = Recorded(replay, addresses, made)
            return
        replay, expected, made = graphs.recorded[self, kind]
        if addresses != expected:
            raise UsageError(
                f"stage {self.stage.index} received a value of another shape, or at another address, than when its "
                "graphs were recorded: make the Pipeline without graph=True"
            )
        for slot in takes:
            slot.tensors = []
        replay()
        for slot, (tensors, spec, grads) in zip(makes, made, strict=True):
            slot.tensors, slot.spec, slot.grads = [*tensors], spec, grads


def _nothing() -> None:
    """Replays the graph of a W for which I left nothing."""


def _without_values(leaf: object) -> object:
    if not isinstance(leaf, Tensor):
        return leaf
    return torch.empty(leaf.shape, dtype=leaf.dtype, device="meta").requires_grad_(leaf.requires_grad)
