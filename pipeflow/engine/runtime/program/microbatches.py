"""Microbatches: the computations of one microbatch in one stage, and what each leaves to the next. Each is given all it
needs when the program is compiled, so that a step looks nothing up. Must not contain: transfers between ranks, and
what a forward saves, which `memory_actions` moves or computes again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field

from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from pipeflow.core.errors import UsageError
from pipeflow.engine.deferral.products import Queue, run_products
from pipeflow.engine.runtime.program.results import Results
from pipeflow.engine.runtime.program.slots import Buffers, Slot, Unused, flatten, may_be_overwritten
from pipeflow.engine.runtime.stage import Stage
from pipeflow.engine.torch_private.autograd import run_backward
from pipeflow.engine.torch_private.trees import tree_unflatten


@dataclass(eq=False)
class Microbatch:
    """One microbatch in one stage.

    A forward keeps the leaves of its graph and the gradient edges of its output, but not the output itself, whose
    memory is freed once it is sent. I keeps the products that are still to be added to the weights' gradients.

    Attributes:
        stage: the stage.
        index: number of the microbatch; of slices, they are numbered through all microbatches.
        inputs: what earlier stages send, in the order of the stage's arguments; none for the first stage.
        outputs: what later stages take, by stage, in the order in which it is returned; none for the last stage.
        input_gradients, output_gradients: of the inputs, and of the outputs.
        given: arguments of the first stage, by microbatch.
        results: what the last stage computes from its output.
        buffers: memory of the rank for what it receives.
        training: whether a backward follows.
        defers: whether layers leave weight gradients for W, or add them themselves.
        fills: whether a backward must begin at each output, with zeros where there is no gradient.
        slices: into how many slices microbatches are cut.
    """

    stage: Stage
    index: int
    inputs: Sequence[Slot]
    outputs: Mapping[int, Slot]
    input_gradients: Sequence[Slot]
    output_gradients: Sequence[Slot]
    given: list[tuple[object, ...]]
    results: Results
    buffers: Buffers
    _: KW_ONLY
    training: bool
    defers: bool
    fills: bool
    slices: int = 1
    leaves: list[Tensor] = field(default_factory=list, init=False)
    edges: list[GradientEdge] = field(default_factory=list, init=False)
    deferred: Queue = field(default_factory=dict, init=False)

    def forward(self) -> None:
        """F: calls the stage with its input, and keeps the output."""
        stage = self.stage
        stage.deferral.active = self.defers
        call = stage.call if self.slices == 1 else self.call  # saves a Python call
        self.keep(call(*self.arguments(), **stage.keywords[self.index]))

    def call(self, *arguments: object, **keywords: object) -> object:
        """Calls the stage, for a slice of a microbatch in a region that knows what earlier slices left."""
        if self.slices == 1:
            return self.stage.call(*arguments, **keywords)
        last = None if self.training else self.slices - 1
        with self.stage.slices.at(*divmod(self.index, self.slices), last=last):
            return self.stage.call(*arguments, **keywords)

    def arguments(self) -> tuple[object, ...]:
        """The stage's input: that of the batch, or what earlier stages sent, as leaves of a new graph."""
        if not self.inputs:
            return self.given[self.index]
        arguments = list[object]()
        self.leaves = []
        for slot in self.inputs:
            tensors = slot.take()
            if self.training:
                for tensor, wanted in zip(tensors, slot.grads, strict=True):
                    if wanted:
                        tensor.requires_grad_()
                self.leaves += tensors
            arguments.append(tensors[0] if slot.spec is None else tree_unflatten(tensors, slot.spec))
        return tuple(arguments)

    def keep(self, output: object) -> None:
        """Puts the stage's output where later stages take it, or computes the loss from it; keeps its edges."""
        if not self.outputs:
            self.edges = self.results.take(self.index, output, training=self.training)
            return
        self.edges = edges = list[GradientEdge]()
        parts = (output,) if len(self.outputs) == 1 else self._parts(output)
        for slot, part in zip(self.outputs.values(), parts, strict=True):
            slot.tensors, slot.spec = flatten(part, self.buffers.device)
            slot.grads = ()
            for place, tensor in enumerate(slot.tensors):
                slot.grads += (tensor.requires_grad,)
                if self.training and tensor.requires_grad:
                    edges.append(get_gradient_edge(tensor))
                slot.tensors[place] = _to_send(tensor, self.buffers)

    def _parts(self, output: object) -> Sequence[object]:
        """The entry of the output for each of the stages that take one."""
        if not isinstance(output, tuple | list) or len(output) != len(self.outputs):
            has = f"{len(output)} entries" if isinstance(output, tuple | list) else f"a {type(output).__name__}"
            raise UsageError(
                f"stage {self.stage.index} sends its output to stages {', '.join(map(str, self.outputs))}, so it must "
                f"return a tuple with an entry for each of them, in this order; it returned {has}"
            )
        return output

    def backward(self) -> None:
        """B: computes gradients of parameters and input from the output's. Layers called again defer as in F."""
        self._backward(defers=self.stage.deferral.fuses)

    def backward_input(self) -> None:
        """I: like B, but layers that can do so keep the products that make weight gradients for W."""
        deferral = self.stage.deferral
        deferral.queue = self.deferred
        try:
            self._backward(defers=True)
        finally:
            deferral.queue = None

    def backward_weight(self) -> None:
        """W: runs the products that I kept, in the same order."""
        run_products(self.deferred)

    def starts(self) -> list[Tensor]:
        """The gradients with which a backward starts in the last stage; none in others."""
        return [] if self.outputs else self.results.gradients(self.index)

    def _backward(self, *, defers: bool) -> None:
        gradients = self.starts()
        for slot in self.output_gradients:
            gradients += slot.take()
        if self.fills:
            gradients = [each.zeros() if isinstance(each, Unused) else each for each in gradients]
        self.stage.deferral.active = defers
        if self.edges:
            if self.slices == 1:
                self._run(gradients)
            else:  # a layer may run its forward again
                with self.stage.slices.at(*divmod(self.index, self.slices), last=0):
                    self._run(gradients)
        leaves, self.leaves = iter(self.leaves), []
        for slot, gradient in zip(self.inputs, self.input_gradients, strict=True):
            gradient.tensors = []
            for wants, leaf in zip(slot.grads, leaves, strict=False):  # those of all inputs
                if wants:
                    gradient.tensors.append(_gradient_of(leaf))

    def _run(self, gradients: list[Tensor]) -> None:
        """torch.autograd.backward without its checks of the arguments, which take as long as a small backward:
        gradients fit their edges, because each is made for its edge or received with the shape of what was sent.
        Nothing flows into edges whose gradient is `Unused`.
        """
        edges, self.edges = self.edges, []
        if Unused in map(type, gradients):
            used = [pair for pair in zip(edges, gradients, strict=True) if not isinstance(pair[1], Unused)]
            if not used:
                return
            edges, gradients = map(list, zip(*used, strict=True))
        options = {"keep_graph": False, "create_graph": False, "allow_unreachable": True, "accumulate_grad": True}
        run_backward(tuple(edges), tuple(gradients), inputs=(), **options)


def _to_send(tensor: Tensor, received: Buffers) -> Tensor:
    """An output without its graph, as plain memory. Memory that may be overwritten before the next stage reads it, such
    as a static buffer, is copied.
    """
    overwritten = may_be_overwritten(tensor, received) if tensor.grad_fn is None else tensor._version  # saves a call
    plain = tensor.detach().clone() if overwritten else tensor.detach()
    return plain.contiguous().resolve_conj().resolve_neg()


def _gradient_of(leaf: Tensor) -> Tensor:
    return Unused.of(leaf) if leaf.grad is None else leaf.grad.contiguous().resolve_conj().resolve_neg()
