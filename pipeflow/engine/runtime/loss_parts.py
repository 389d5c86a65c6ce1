"""Microbatches as what a loss is computed from, with their tensors without memory; and the check of how a loss was
read: some samples of a batch are divided into two parts, whose losses must add up to that of all of them. Must not
contain: how a loss is read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from pipeflow.engine.stages.loss import cells_of, functions_of, own_loss
from pipeflow.engine.stages.loss_values import Computed, Traced, UncheckedError, adds_up
from pipeflow.engine.stages.scaling import Scalars
from pipeflow.engine.stages.stage import ModuleStage
from pipeflow.engine.stages.tape import Leaves, TapeNode
from pipeflow.engine.stages.trace import Look, flattened
from pipeflow.engine.stages.values import SampleAxis, UnprovedError
from pipeflow.engine.torch_private.trees import tree_leaves, tree_map

if TYPE_CHECKING:
    from pipeflow.engine.runtime.divisors import Divisors


SMALL = 64  # entries of a tensor, list or dict that are compared as a setting


@dataclass(frozen=True, slots=True)
class LossPart:
    """A microbatch.

    Attributes:
        entries: the inputs as keywords of the module that was cut; empty for others.
        labels: the labels.
        dims: for each leaf of inputs and labels, the dimension of the samples; -1 for none.
        samples: number of samples.
        pairs: as in Axis.
    """

    entries: dict[str, Any]
    labels: object
    dims: tuple[int, ...]
    samples: int
    pairs: bool

    def larger(self, more: int, donor: LossPart, arguments: Callable[[Any], list[Any]]) -> LossPart:
        """A microbatch with the first `more` samples of another one, too. `arguments` returns the leaves of the inputs
        in the order of `dims`.
        """
        found = {
            id(leaf): given
            for leaf, *given in zip(self.leaves(arguments), donor.leaves(arguments), self.dims, strict=True)
        }

        def grown(leaf: object) -> object:
            given, dim = found[id(leaf)]
            if not isinstance(leaf, Tensor) or dim < 0:
                return leaf
            return torch.cat(
                [leaf.detach(), given.detach().narrow(dim, 0, given.shape[dim] * more // donor.samples)], dim
            )

        return replace(
            self,
            entries=tree_map(grown, self.entries),
            labels=tree_map(grown, self.labels),
            samples=self.samples + more,
        )

    def some(self, first: int, count: int, arguments: Callable[[Any], list[Any]]) -> LossPart:
        """A microbatch of `count` of its samples, from the index `first` on. `arguments` is as in `larger`."""
        found = {id(leaf): dim for leaf, dim in zip(self.leaves(arguments), self.dims, strict=True)}

        def cut(leaf: object) -> object:
            dim = found[id(leaf)]
            if not isinstance(leaf, Tensor) or dim < 0:
                return leaf
            each = leaf.shape[dim] // self.samples
            return leaf.detach().narrow(dim, first * each, count * each)

        return replace(self, entries=tree_map(cut, self.entries), labels=tree_map(cut, self.labels), samples=count)

    @staticmethod
    def whole(parts: Sequence[LossPart], arguments: Callable[[Any], list[Any]]) -> LossPart:
        """All microbatches of a batch as one."""
        found = parts[0]
        for part in parts[1:]:
            found = found.larger(part.samples, part, arguments)
        return found

    def leaves(self, arguments: Callable[[Any], list[Any]]) -> list[Any]:
        """The leaves of inputs and labels, in the order of `dims`."""
        return [*arguments(self.entries), *tree_leaves(self.labels)]


def leaves_of(entries: Any, stage: ModuleStage | None) -> list[Any]:
    """The leaves of a microbatch's inputs, in the order in which a trace numbers them."""
    return [] if stage is None else flattened(stage.planner.entries.arguments(entries))[0]


def axis_of(part: LossPart, node: TapeNode) -> SampleAxis | None:
    """Where the samples of a tensor lie that no operator made."""
    if isinstance(node.leaf, int):
        dim = part.dims[node.leaf]
        return None if dim < 0 or not node.shape else _axis_at(dim, part, node)
    sizes = [dim for dim, size in enumerate(node.shape) if size == part.samples]
    dims = (
        sizes if len(sizes) == 1 else [dim for dim, size in enumerate(node.shape) if size and not size % part.samples]
    )
    if not dims:
        raise UnprovedError("a block returns a tensor that has no dimension of the samples")
    return _axis_at(dims[0], part, node)


def _axis_at(dim: int, part: LossPart, node: TapeNode) -> SampleAxis:
    return SampleAxis(dim, 1, max(node.shape[dim] // part.samples, 1), pairs=part.pairs)


def stand_in(leaf: object) -> object:
    """A tensor without memory in place of one that a trace describes."""
    if not isinstance(leaf, Look):
        return leaf
    return torch.empty_strided(leaf.shape, leaf.stride, dtype=leaf.dtype, device="meta").requires_grad_(
        leaf.requires_grad
    )


def resized(output: object, part: LossPart, other: LossPart) -> object:
    """What the last stage is expected to return for another microbatch, of which only shapes count: dim 0 grows with
    the samples, other dimensions with those of the labels that have the same size.
    """
    if output is None or part is other:
        return output
    sizes: dict[tuple[int, int], int] = {}
    for its, others in zip(tree_leaves(part.labels), tree_leaves(other.labels), strict=False):
        if isinstance(its, Tensor) and isinstance(others, Tensor) and its.dim() == others.dim():
            sizes |= {(dim, size): others.shape[dim] for dim, size in enumerate(its.shape) if dim}

    def sized(leaf: object) -> object:
        if not isinstance(leaf, Tensor) or not leaf.dim():
            return leaf
        rows, *rest = leaf.shape
        rows = rows if rows % part.samples else rows // part.samples * other.samples
        shape = (rows, *(sizes.get((dim, size), size) for dim, size in enumerate(rest, 1)))
        return torch.zeros(shape, dtype=leaf.dtype, device="meta").requires_grad_(leaf.requires_grad)

    return tree_map(sized, output)


def shapes_of(output: object) -> list[tuple[int, ...]]:
    """The shapes of the tensors of an output."""
    return [tuple(leaf.shape) for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]


def key_of(part: LossPart) -> Any:
    """What the terms of the loss of a microbatch depend on, beside its trace."""

    def look(leaf: object) -> object:
        return (leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else repr(leaf)

    return tuple(map(look, tree_leaves(part.labels))), part.dims, part.samples


def settings_of(criterion: object) -> tuple[Any, ...]:
    """The plain attributes of a criterion and of its modules, and the variables of its functions, on which it may
    depend what its loss is divided by.
    """
    if criterion is own_loss:
        return ()
    parts = criterion.modules() if isinstance(criterion, nn.Module) else [criterion]
    owners = [part for part in parts if not isinstance(part, FunctionType) and hasattr(part, "__dict__")]
    named = [(index, name, each) for index, owner in enumerate(owners) for name, each in vars(owner).items()]
    found = [each for each in named if _is_plain(each[2]) or not each[1].startswith("_")]
    forwards = [getattr(type(owner), name, None) for owner in owners for name in ("forward", "__call__")]
    for index, function in enumerate(_with_called([*functions_of(criterion), *forwards])):
        names = function.__code__.co_names
        found += [(index, name, each) for name, each in function.__globals__.items() if name in names]
        found += [(index, "", content) for _, content in cells_of(function)]
    return tuple((index, name, _setting(each)) for index, name, each in found)


def _is_plain(value: object) -> bool:
    return isinstance(value, bool | int | float | str | None)


def _with_called(functions: Sequence[object]) -> list[FunctionType]:
    """These functions, and those of their modules that they name."""
    pending, found = [each for each in functions if isinstance(each, FunctionType)], dict[FunctionType, None]()
    while pending:
        each = pending.pop()
        if each not in found and each.__module__.partition(".")[0] != "torch":
            found[each] = None
            named = [each.__globals__.get(name) for name in each.__code__.co_names]
            pending += [its for its in named if isinstance(its, FunctionType) and its.__module__ == each.__module__]
    return list(found)


def _setting(value: object, depth: int = 3) -> object:
    """The same for a setting that is the same; in `depth` levels of lists and dicts."""
    if isinstance(value, Tensor):
        if value.device.type == "cpu" and value.numel() <= SMALL and not isinstance(value, nn.Parameter):
            return repr(value.tolist())
        return id(value), 0 if value.requires_grad or value.is_inference() else value._version
    if depth and isinstance(value, list | tuple | set) and len(value) <= SMALL:
        return type(value), tuple(_setting(each, depth - 1) for each in value)
    if depth and isinstance(value, dict) and len(value) <= SMALL:
        return tuple((repr(name), _setting(each, depth - 1)) for name, each in value.items())
    return value if _is_plain(value) else id(value)


class Joined:
    """The leaves of all microbatches of a batch as one.

    Args:
        leaves: those of each microbatch.
        dims: for each leaf, the dimension of the samples; -1 for none.
    """

    def __init__(self, leaves: Sequence[Leaves], dims: Sequence[int]) -> None:
        self._leaves, self._dims = leaves, dims
        self._found: dict[int | str, Any] = {}

    def __getitem__(self, leaf: int | str) -> Any:
        if leaf not in self._found:
            self._found[leaf] = self._joined(leaf)
        return self._found[leaf]

    def _joined(self, leaf: int | str) -> Any:
        first = self._leaves[0][leaf]
        if isinstance(leaf, str) or self._dims[leaf] < 0 or not isinstance(first, Tensor):
            return first
        return torch.cat([each[leaf] for each in self._leaves], self._dims[leaf])


class OnHost:
    """The leaves of a microbatch, and buffers. What is read is copied to the host, for all microbatches at once.

    Args:
        microbatch: its number.
        leaves: function that returns the leaves of each microbatch.
        buffers: function that returns a buffer by its name.
        copies: the copies of the leaves of all microbatches, by index.
    """

    def __init__(
        self,
        microbatch: int,
        leaves: Callable[[], list[list[Any]]],
        buffers: Callable[[str], Tensor],
        copies: dict[int, Sequence[Any]],
    ) -> None:
        self._microbatch, self._leaves, self._buffers, self._copies = microbatch, leaves, buffers, copies

    def __getitem__(self, leaf: int | str) -> Any:
        """A leaf by its index, or a buffer by its name."""
        if isinstance(leaf, str):
            return self._buffers(leaf).detach().cpu()
        if leaf not in self._copies:
            self._copies[leaf] = _on_host([each[leaf] for each in self._leaves()])
        return self._copies[leaf][self._microbatch]


def _on_host(column: list[Any]) -> Sequence[Any]:
    """Tensors of microbatches in CPU memory, for which the host waits once; other objects as they are."""
    if not all(isinstance(each, Tensor) for each in column) or column[0].device.type == "cpu":
        return column
    if all(each is column[0] for each in column):
        return [column[0].detach().cpu()] * len(column)
    entries = torch.cat([each.detach().reshape(-1) for each in column]).cpu().split([each.numel() for each in column])
    return [its.view(each.shape) for its, each in zip(entries, column, strict=True)]


FIRST, SECOND = 3, 2  # most samples of the two parts


def is_contradicted(divisors: Divisors, parts: Sequence[LossPart], outputs: Sequence[object]) -> bool:
    """True if the losses of two parts of some samples, or their gradients, do not add up to those of all, though they
    should. False if that cannot be tried. Raises UnprovedError if it is not known what the parts are divided by.
    """
    pairs = dict.fromkeys(((0, min(1, len(parts) - 1)), (max(0, len(parts) - 2), len(parts) - 1)))
    return any(_is_contradicted(divisors, parts, outputs[0], pair) for pair in pairs)


def _is_contradicted(divisors: Divisors, parts: Sequence[LossPart], output: object, pair: tuple[int, int]) -> bool:
    try:
        return not _adds_up(divisors, parts[0], output, *_two_of(parts, pair, divisors.leaves_of))
    except (UncheckedError, RuntimeError, ValueError, TypeError, IndexError, NotImplementedError):
        return False


def _adds_up(divisors: Divisors, like: LossPart, output: object, first: LossPart, second: LossPart) -> bool:
    """Whether two parts add up. `output` is what the last stage returns for the microbatch `like`."""
    parts = (first, second, first.larger(second.samples, second, divisors.leaves_of))
    given = [resized(output, like, each) for each in parts]
    scalars = [Scalars() for _ in parts]
    try:
        read = [divisors.recorded(*each) for each in zip(parts, given, scalars, strict=True)]
    except UnprovedError as error:  # the forward may take microbatches of one size alone
        raise UncheckedError(str(error)) from error
    own, copies = [each.leaves(divisors.leaves_of) for each in parts], dict[int, Sequence[Any]]()
    leaves = [OnHost(index, lambda: own, divisors.buffer, copies) for index in range(len(parts))]
    weights = divisors.weights_of(parts[:2], given[:2], leaves[:2], [first.samples, second.samples], 1)

    def scaled(index: int, values: Computed) -> Tensor:
        loss: Tensor = values[read[index].node]
        if weights.scaling is None:
            return loss * weights.parts[index] if weights.parts[index] else torch.zeros_like(loss)
        return weights.scaling.rescaled(loss, [_of(each.node, values) for each in scalars[index].found], index)

    traced = [
        Traced(each.node, its, partial(axis_of, part)) for each, its, part in zip(read, leaves, parts, strict=True)
    ]
    return adds_up(traced[:2], traced[2], scaled)


def _of(node: TapeNode | None, values: Computed) -> Any:
    return None if node is None else values.get(node)


def _two_of(
    parts: Sequence[LossPart], pair: tuple[int, int], arguments: Callable[[Any], list[Any]]
) -> tuple[LossPart, LossPart]:
    """Some samples of two microbatches, or of one that has them all."""
    first, second = (parts[index] for index in pair)
    if first.pairs or (first is second and first.samples < 2):
        raise UncheckedError("its samples cannot be divided")
    if first is second:
        count = min(FIRST, first.samples - 1)
        return first.some(0, count, arguments), first.some(count, min(SECOND, first.samples - count), arguments)
    counts = min(FIRST, first.samples), min(SECOND, second.samples)
    return first.some(0, counts[0], arguments), second.some(0, counts[1], arguments)
