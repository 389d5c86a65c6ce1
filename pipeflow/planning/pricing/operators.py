"""Operators: the operations, and the bytes that are moved and saved, of one forward of a module on fake tensors, which
takes neither memory nor arithmetic. Must not contain: rates of devices, or stages.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import flop_registry

from pipeflow.engine.stages.flow import Flow
from pipeflow.engine.torch_private.modes import TorchDispatchMode
from pipeflow.engine.torch_private.trees import tree_leaves
from pipeflow.planning.attention import Scores
from pipeflow.planning.work import ATTENTION_AGAIN, DeviceWork, MatrixProduct

_aten: Any = torch.ops.aten
_MATRICES = {_aten.mm: 0, _aten.addmm: 1, _aten.bmm: 0, _aten.baddbmm: 1}
"""Products of matrices, with the position of the first operand; the second one follows."""
_FUSED = {packet for packet in flop_registry if "attention" in str(packet) and "backward" not in str(packet)}
_PICKING = {_aten.embedding, _aten.index, _aten.gather, _aten.index_select}
_PICKING |= {_aten.nll_loss_forward, _aten.nll_loss2d_forward}
"""Operators that read as much of their first argument as they return."""
_MAKES_NOTHING = {_aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty, _aten.new_empty_strided}


@dataclass(frozen=True, slots=True)
class ForwardPart:
    """A part of a forward, for one microbatch.

    Attributes:
        name: that of its block, or "".
        work: what it computes.
        operations: how many it launches.
        saved: bytes that it keeps for the backward, by the number of their memory.
        deferred: the inputs of its products with weights, and as many bytes as gradients of their outputs have.
        given: its arguments, which alone are kept where the backward computes it again.
        gradients: the most bytes of the gradients that the backward of one of its operators takes and makes.
        is_block: whether the backward may compute it again.
    """

    name: str
    work: DeviceWork
    operations: int
    saved: Mapping[int, int]
    deferred: Mapping[int, int]
    given: Mapping[int, int]
    gradients: int
    is_block: bool


@dataclass
class Counter:
    """Context manager that counts what runs in it, under a Flow. A call of scaled_dot_product_attention counts as
    fused, and a dropout as one operation that keeps a mask of a byte per entry, as on a GPU.

    Args:
        flow: the flow in which it runs, whose clock says when.
        weights: the parameters.

    Attributes:
        sizes: bytes of each storage that was made.
    """

    flow: Flow
    weights: Sequence[Tensor]
    sizes: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._weights = {self.flow.key(tensor) for tensor in self.weights}
        self._made_of_weights = set(self._weights)
        self._events: list[tuple[int, DeviceWork, int]] = []  # when, what, and the bytes of its gradients
        self._saved: list[tuple[int, int, int]] = []  # when, the number of its memory, and its bytes
        self._deferred: list[tuple[int, int, int]] = []
        hooks = torch.autograd.graph.saved_tensors_hooks(self._save, _unpacked)
        self._contexts: tuple[Any, ...] = (_Operators(self), _FusedCalls(self), hooks)

    def __enter__(self) -> Counter:
        for each in self._contexts:
            each.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for each in reversed(self._contexts):
            each.__exit__(kind, error, trace)

    def pieces(
        self, points: Sequence[int], blocks: dict[int, str], given: dict[int, frozenset[int]]
    ) -> list[ForwardPart]:
        """The work counted before the first of `points`, which are times, between each two, and after the last.

        `blocks` has the names of the pieces that are blocks, and `given` the storages of their arguments, by index.
        """
        events: list[list[tuple[DeviceWork, int]]] = [[] for _ in range(len(points) + 1)]
        for clock, work, gradients in self._events:
            events[bisect_right(points, clock)].append((work, gradients))
        saved, deferred = _kept_between(self._saved, points), _kept_between(self._deferred, points)
        return [
            ForwardPart(
                blocks.get(index, ""),
                _together([work for work, _ in each]),
                len(each),
                saved[index],
                deferred[index],
                {key: self.sizes[key] for key in given.get(index, ()) if key in self.sizes},
                max((gradients for _, gradients in each), default=0),
                index in blocks,
            )
            for index, each in enumerate(events)
        ]

    def _save(self, tensor: Tensor) -> Tensor:
        key = self.flow.key(tensor)
        if key not in self._weights:
            self._saved.append((self.flow.clock, key, _stored(tensor)))
        return tensor.detach() if tensor.requires_grad else tensor

    def _defer(self, *tensors: Tensor) -> None:
        for each in tensors:
            self._deferred.append((self.flow.clock, self.flow.key(each), each.numel() * each.element_size()))

    def _add(self, work: DeviceWork, gradients: int) -> None:
        self._events.append((self.flow.clock, work, gradients))

    def count_attention(self, query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool) -> None:
        """Counts fused attention, which skips what a causal mask leaves out."""
        batch, rows, width = query.shape[:-2].numel(), query.shape[-2], query.shape[-1] + value.shape[-1]
        flops = 2.0 * batch * rows * key.shape[-2] * width / (2 if is_causal else 1)
        shape = Scores("flash1", key.shape[-2], width / 2, is_causal)  # the kernel is that of the setup
        gradients = self._gradients([query, key, value]) + _touched(query)
        self._add(DeviceWork((), flops, ATTENTION_AGAIN * flops, scores=shape), gradients)

    def count(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Counts an operator that has run."""
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        made = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        keys = [self.flow.key(tensor) for tensor in given]
        if not made or func.namespace == "prim" or func.overloadpacket in _MAKES_NOTHING:
            self._note(made, keys)
            return
        if func.is_view or (not _writes(func) and all(self.flow.key(tensor) in keys for tensor in made)):
            return
        self._note(made, keys)
        self._add(self._work(func, args, kwargs, output, given, made), self._gradients([*given, *made]))

    def _work(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: Any,
        given: list[Tensor],
        made: list[Tensor],
    ) -> DeviceWork:
        packet = func.overloadpacket
        if packet in _MATRICES:
            first = _MATRICES[packet]
            return self._product(args[first], args[first + 1], made[0])
        if packet is _aten.convolution:
            return self._convolution(args[0], args[1], made[0], is_transposed=args[6], groups=args[8])
        if packet in _FUSED:
            flops = float(flop_registry[packet](*args, **kwargs, out_val=output))
            return DeviceWork((), flops, ATTENTION_AGAIN * flops)
        return DeviceWork((), moved_bytes=_moved(packet, given, made))

    def _gradients(self, tensors: Sequence[Tensor]) -> int:
        """Bytes of gradients of activations."""
        found = {self.flow.key(tensor): tensor for tensor in tensors if tensor.is_floating_point()}
        return sum(_touched(tensor) for key, tensor in found.items() if key not in self._made_of_weights)

    def _note(self, made: list[Tensor], keys: list[int]) -> None:
        is_of_weights = bool(keys) and self._made_of_weights.issuperset(keys)
        for tensor in made:
            key = self.flow.key(tensor)
            self.sizes[key] = _stored(tensor)
            if is_of_weights:
                self._made_of_weights.add(key)

    def _product(self, one: Tensor, other: Tensor, made: Tensor) -> DeviceWork:
        """A product with a weight, or of two activations, which counts as attention's."""
        rows, depth, columns = one.shape[-2], one.shape[-1], other.shape[-1]
        repeats = one.shape[:-2].numel()
        sides = [tensor for tensor in (one, other) if self.flow.key(tensor) not in self._made_of_weights]
        if len(sides) == 2:
            return DeviceWork((), 2.0 * rows * columns * depth * repeats)
        self._defer(*sides, made)
        return DeviceWork((MatrixProduct(rows, columns, depth, repeats),))

    def _convolution(
        self, given: Tensor, weight: Tensor, made: Tensor, *, is_transposed: bool, groups: int
    ) -> DeviceWork:
        """The product of patches with the weight, [out, in / groups, *kernel], or with in and out exchanged."""
        places = given if is_transposed else made
        rows = places.shape[0] * places.shape[2:].numel()
        inner, kernel = weight.shape[1], weight.shape[2:].numel()
        outer = weight.shape[0] // groups
        columns, depth = (inner * kernel, outer) if is_transposed else (outer, inner * kernel)
        self._defer(given, made)
        return DeviceWork((MatrixProduct(rows, columns, depth, groups),))


def _together(works: Sequence[DeviceWork]) -> DeviceWork:
    """The work of several operations, with the first shape of attention among them."""
    return DeviceWork(
        tuple(product for work in works for product in work.products),
        attention_flops=sum(work.attention_flops for work in works),
        again_flops=sum(work.again_flops for work in works),
        moved_bytes=sum(work.moved_bytes for work in works),
        scores=next((work.scores for work in works if work.scores is not None), None),
    )


def _kept_between(kept: Sequence[tuple[int, int, int]], points: Sequence[int]) -> list[dict[int, int]]:
    """Before the first of `points`, which are times, between each two, and after the last: the bytes of what is kept by
    the number of their memory.
    """
    found: list[dict[int, int]] = [{} for _ in range(len(points) + 1)]
    for clock, key, nbytes in kept:
        found[bisect_right(points, clock)][key] = nbytes
    return found


class _Operators(TorchDispatchMode):
    """Counts the operators that are dispatched below autograd."""

    def __init__(self, counter: Counter) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self._counter = counter

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        self._counter.count(func, args, kwargs or {}, output)
        return output


class _FusedCalls(TorchFunctionMode):
    """Replaces calls that a CPU computes in several operators and a GPU in one."""

    def __init__(self, counter: Counter) -> None:
        super().__init__()
        self._counter = counter

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is functional.scaled_dot_product_attention:
            return self._attention(*args, **kwargs)
        if func is functional.dropout:
            return _dropout(*args, **kwargs)
        return func(*args, **kwargs)

    def _attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **_: object,
    ) -> Tensor:
        self._counter.count_attention(query, key, value, is_causal=is_causal)
        made: Tensor = _Attention.apply(query, key, value, attn_mask)  # type: ignore[no-untyped-call]  # torch's
        return made


class _Attention(torch.autograd.Function):
    """The shape of fused attention's output, and what it saves (arXiv 2205.14135). It computes nothing."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        size = (*query.shape[:-1], value.shape[-1])
        if len(size) > 3:  # heads are next to each other in memory, as in torch's
            made = query.new_empty(*size[:-3], size[-2], size[-3], size[-1]).transpose(-2, -3)
        else:
            made = query.new_empty(size)
        sums = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, made, sums, *([] if mask is None else [mask]))
        return made


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    if training and 0 < p < 1 and not inplace:
        return torch.native_dropout(input, p, True)[0]
    return functional.dropout(input, p, training, inplace)


def _unpacked(tensor: Tensor) -> Tensor:
    return tensor


def _stored(tensor: Tensor) -> int:
    """The bytes of the tensor's memory."""
    try:
        return tensor.untyped_storage().nbytes()
    except (NotImplementedError, RuntimeError):  # a layout without a storage
        return tensor.numel() * tensor.element_size()


def _moved(packet: Any, given: Sequence[Tensor], made: Sequence[Tensor]) -> float:
    """The bytes that an operator reads and writes."""
    written = sum(_touched(tensor) for tensor in made)
    if packet in _PICKING:
        return written * 2 + sum(_touched(tensor) for tensor in given[1:])
    return written + sum(_touched(tensor) for tensor in given)


def _touched(tensor: Tensor) -> int:
    """The bytes of a tensor's entries in memory; an expanded one has fewer than it shows."""
    return min(tensor.numel() * tensor.element_size(), _stored(tensor))


@cache
def _writes(func: Any) -> bool:
    return any(each.alias_info is not None and each.alias_info.is_write for each in func._schema.arguments)
