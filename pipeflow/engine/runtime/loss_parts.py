"""Microbatches as what a loss is computed from, their tensors without memory, and the settings of a criterion. Must not
contain: how a loss is read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from pipeflow.engine.stages.copies import cells_of
from pipeflow.engine.stages.criterion import functions_of, own_loss
from pipeflow.engine.stages.stage import ModuleStage
from pipeflow.engine.stages.tape import Leaves, TapeNode
from pipeflow.engine.stages.trace import Look, flattened
from pipeflow.engine.stages.values import SampleAxis, UnprovedError
from pipeflow.engine.torch_private.trees import tree_leaves, tree_map

SMALL = 64  # entries of a tensor, list or dict that are compared as a setting


@dataclass(frozen=True, slots=True)
class LossPart:
    """A microbatch.

    Attributes:
        entries: the inputs as keywords of the module that was cut; empty for others.
        labels: the labels.
        dims: a tree like the pair of them, with the dimension of the samples in place of each leaf; -1 for none.
        order: these dimensions, in the order in which a trace numbers the leaves.
        samples: number of samples.
        pairs: as in Axis.
    """

    entries: dict[str, Any]
    labels: object
    dims: tuple[object, object]
    order: tuple[int, ...]
    samples: int
    pairs: bool

    def larger(self, more: int, donor: LossPart) -> LossPart:
        """A microbatch with the first `more` samples of another one, too."""

        def grown(leaf: object, other: Any, dim: int) -> object:
            if not isinstance(leaf, Tensor) or dim < 0:
                return leaf
            added = other.detach().narrow(dim, 0, other.shape[dim] * more // donor.samples)
            return torch.cat([leaf.detach(), added], dim)

        its = (donor.entries, donor.labels)
        entries, labels = tree_map(grown, (self.entries, self.labels), its, self.dims)
        return replace(self, entries=entries, labels=labels, samples=self.samples + more)

    def some(self, first: int, count: int) -> LossPart:
        """A microbatch of `count` of its samples, from the index `first` on."""

        def cut(leaf: object, dim: int) -> object:
            if not isinstance(leaf, Tensor) or dim < 0:
                return leaf
            each = leaf.shape[dim] // self.samples
            return leaf.detach().narrow(dim, first * each, count * each)

        entries, labels = tree_map(cut, (self.entries, self.labels), self.dims)
        return replace(self, entries=entries, labels=labels, samples=count)

    @staticmethod
    def whole(parts: Sequence[LossPart]) -> LossPart:
        """All microbatches of a batch as one."""
        return reduce(lambda found, part: found.larger(part.samples, part), parts)


def leaves_of(entries: Any, stage: ModuleStage | None) -> list[Any]:
    """The leaves of a microbatch's inputs, in the order in which a trace numbers them."""
    return [] if stage is None else flattened(stage.planner.entries.arguments(entries))[0]


def axis_of(part: LossPart, node: TapeNode) -> SampleAxis | None:
    """Where the samples of a tensor lie that no operator made."""
    if isinstance(node.leaf, int):
        dim = part.order[node.leaf]
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

    return tuple(map(look, tree_leaves(part.labels))), part.order, part.samples


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


class Lazy(dict[Any, Any]):
    """A dict whose values are made when they are read first.

    Args:
        make: makes the value of a key.
    """

    def __init__(self, make: Callable[[Any], Any]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, key: Any) -> Any:
        self[key] = made = self._make(key)
        return made


def joined(leaves: Sequence[Leaves], dims: Sequence[int]) -> Leaves:
    """The leaves of all microbatches of a batch as one. `dims` has for each leaf the dimension of the samples."""

    def whole(leaf: int | str) -> Any:
        first = leaves[0][leaf]
        if isinstance(leaf, str) or dims[leaf] < 0 or not isinstance(first, Tensor):
            return first
        return torch.cat([each[leaf] for each in leaves], dims[leaf])

    return Lazy(whole)


def on_host(leaves: Callable[[], list[list[Any]]], microbatches: int, buffer: Callable[[str], Tensor]) -> list[Leaves]:
    """The leaves of microbatches, and buffers by their names. What is read is copied to the host, for all microbatches
    at once.
    """
    columns = Lazy(lambda leaf: _on_host([each[leaf] for each in leaves()]))
    buffers = Lazy(lambda name: buffer(name).detach().cpu())

    def of(microbatch: int) -> Leaves:
        return Lazy(lambda leaf: buffers[leaf] if isinstance(leaf, str) else columns[leaf][microbatch])

    return [of(microbatch) for microbatch in range(microbatches)]


def _on_host(column: list[Any]) -> Sequence[Any]:
    """Tensors of microbatches in CPU memory, for which the host waits once; other objects as they are."""
    if not all(isinstance(each, Tensor) for each in column) or column[0].device.type == "cpu":
        return column
    if all(each is column[0] for each in column):
        return [column[0].detach().cpu()] * len(column)
    entries = torch.cat([each.detach().reshape(-1) for each in column]).cpu().split([each.numel() for each in column])
    return [its.view(each.shape) for its, each in zip(entries, column, strict=True)]
