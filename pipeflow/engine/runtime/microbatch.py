"""Microbatches: splits batches, also those that the caller has divided, and merges outputs. Only this file looks into
the structure of what users pass in.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from pipeflow.core.cost import CostModel
from pipeflow.core.errors import UsageError
from pipeflow.core.schedule import Schedule
from pipeflow.engine.runtime.devices import copied
from pipeflow.engine.stages.entries import no_pair
from pipeflow.engine.stages.plan import look_of
from pipeflow.engine.torch_private.trees import (
    register_pytree_node,
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_unflatten,
)

DIGESTED = 1024  # entries of a row that enter a digest


class Whole:
    """An entry of a batch that has no samples, such as a mask between positions: every microbatch gets all of it.

    >>> batch = {"tokens": torch.ones(8, 5), "mask": Whole(torch.ones(5, 5))}, None

    Args:
        value: a tensor, or a tree of tensors.
    """

    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value = value


class Along:
    """An entry of a batch, or a part of an output, whose samples lie along another dimension than 0. A stage receives
    the tensor itself, split along that dimension; the outputs of microbatches are joined along it.

    >>> positions = torch.arange(5).expand(3, 8, 5)  # of 8 samples
    >>> batch = {"tokens": torch.ones(8, 5), "positions": Along(positions, 1)}, None

    Args:
        value: a tensor, or a tree of tensors.
        dim: the dimension of the samples, the same of all tensors; it may be negative.
    """

    __slots__ = ("dim", "value")

    def __init__(self, value: object, dim: int) -> None:
        self.value, self.dim = value, dim

    def size(self) -> int:
        """The number of samples. Raises UsageError if its tensors have other numbers, or not that dimension."""
        shapes = [tuple(leaf.shape) for leaf in tree_leaves(self.value) if isinstance(leaf, Tensor)]
        sizes = {shape[self.dim] if -len(shape) <= self.dim < len(shape) else None for shape in shapes}
        if len(sizes) != 1 or None in sizes:
            raise UsageError(
                f"pipeflow.Along(value, {self.dim}) needs tensors of as many samples along dim {self.dim}, got shapes "
                f"{shapes}"
            )
        [size] = sizes
        assert size is not None
        return size


register_pytree_node(  # what moves, sends or maps the tensors of a tree finds those in it
    Along,
    lambda along: ([along.value], along.dim),
    lambda values, dim: Along(next(iter(values)), dim),
    serialized_type_name="pipeflow.Along",
)


def _is_whole(tree: object) -> bool:
    return isinstance(tree, Whole | Along | EntryParts)


def _is_no_dict(tree: object) -> bool:
    return not isinstance(tree, dict)


@dataclass(frozen=True, slots=True)
class Batch:
    """One batch, which `split` divides into microbatches.

    Attributes:
        inputs, labels: trees of tensors and other objects.
        sizes: number of samples in each microbatch.
        device: device to which `split` moves tensors; None to move none.
        own: whether other ranks have other entries, so that digests are not compared.
        leaves: inputs that require gradients: each part of the batch, and the leaf that a microbatch uses instead.
        whole: the batch as it was read, if this is the part of a context rank or of a rank in a grid, or is cut into
            slices.
        cuts: the ends of the slices of each microbatch, in tokens; each slice has a part and a size of its own. Empty:
            microbatches are whole.
        repeats: number of parts of a grid of ranks that each compute all of it.
        read: the indices of the microbatches that this rank's replica has read, if it joins those of all replicas.
    """

    inputs: object
    labels: object
    sizes: list[int]
    device: torch.device | None
    own: bool = False
    leaves: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # of inputs that require gradients
    whole: Batch | None = None
    cuts: Sequence[Sequence[int]] = ()
    repeats: int = 1
    read: Sequence[int] | None = None
    _cut: dict[int, tuple[object, Sequence[object]]] = field(default_factory=dict, init=False)  # what is split, by id

    @property
    def samples(self) -> int:
        """The number of samples of the batch."""
        return sum(self.sizes if self.whole is None else self.whole.sizes)

    @property
    def is_divided(self) -> bool:
        """True if the caller has divided it into microbatches."""
        return self._has(EntryParts)

    @property
    def named(self) -> dict[str, object]:
        """The entries of dict inputs, which stages receive by name; empty for other inputs."""
        return self.inputs if isinstance(self.inputs, dict) else {}

    @property
    def has_along(self) -> bool:
        """True if an entry has its samples along another dimension than 0."""
        return self._has(Along)

    def _has(self, kind: type) -> bool:
        return any(isinstance(leaf, kind) for leaf in tree_leaves((self.inputs, self.labels), _is_whole))

    def require_taken(self, names: frozenset[str]) -> None:
        """Raises UsageError for tensors of dict inputs whose names are not in `names`, the names that stages take."""
        for name in self.named.keys() - names:
            if any(
                isinstance(leaf, Tensor | Whole | Along | EntryParts)
                for leaf in tree_leaves(self.named[name], _is_whole)
            ):
                raise UsageError(
                    f"no stage takes the batch's entry {name!r}: stages take {sorted(names)}; make it a parameter of "
                    "a stage's forward, or remove it from the inputs"
                )

    def split(self, tree: object) -> list[Any]:
        """Splits a tree into one part per microbatch. Tensors are split along dim 0, those of Along entries along their
        dim; Whole entries, scalars and other objects are passed whole. Entries of a divided batch have their parts
        already. Tensors that require a gradient become leaves of each microbatch's own graph.
        """
        leaves, spec = tree_flatten(tree, _is_whole)
        parts = [self._parts(leaf) for leaf in leaves]
        if spec.is_leaf():
            return list(parts[0])
        return [tree_unflatten([part[index] for part in parts], spec) for index in range(len(self.sizes))]

    def dims(self, tree: object) -> Any:
        """A tree like a microbatch's part, with the dimension of the samples in place of each tensor, -1 for none."""
        leaves, spec = tree_flatten(tree, _is_whole)
        return tree_unflatten([_dims(leaf) for leaf in leaves], spec)

    def _parts(self, leaf: object) -> Sequence[object]:
        if id(leaf) not in self._cut:
            self._cut[id(leaf)] = leaf, self.divided(leaf)
        parts = self._cut[id(leaf)][1]
        wants = any(isinstance(each, Tensor) and each.requires_grad for each in tree_leaves(parts[0]))
        return [tree_map(self._leaf, part) for part in parts] if wants else parts

    def divided(self, leaf: object) -> Sequence[object]:
        """The leaf on the device, for each microbatch."""
        leaves, spec = tree_flatten(_unwrapped(leaf))
        if (device := self.device) is not None:
            leaves = [copied(each, device) if isinstance(each, Tensor) else each for each in leaves]
        whole: Any = tree_unflatten(leaves, spec)
        if isinstance(leaf, EntryParts):
            return whole  # type: ignore[no-any-return]  # a list
        if isinstance(leaf, Along):
            many = len(self.sizes)
            columns = [
                each.split(self.sizes, leaf.dim) if isinstance(each, Tensor) else [each] * many for each in leaves
            ]
            return [tree_unflatten(part, spec) for part in zip(*columns, strict=True)]
        return whole.split(self.sizes) if isinstance(leaf, Tensor) and leaf.dim() else [whole] * len(self.sizes)

    def _leaf(self, part: object) -> object:
        if not isinstance(part, Tensor) or not part.requires_grad:
            return part
        leaf = part.detach().requires_grad_()
        self.leaves.append((part, leaf))
        return leaf

    def look(self) -> Hashable:
        """What the shapes of activations follow from: sizes, and the shapes, dtypes and plain values of entries."""
        leaves, spec = tree_flatten((self.inputs, self.labels), _is_whole)
        return (*self.sizes, str(spec), *(look_of(_unwrapped(leaf)) for leaf in leaves))

    def digest(self) -> float:
        """A digest of the first and the last row of every tensor of the batch as it was read. It is nan if a tensor is
        not in CPU memory, or has a dtype that only torch can read, and if each rank has its own entries.
        """
        if self.whole is not None:
            return self.whole.digest()
        if self.own:
            return math.nan
        digest = 0
        leaves = tree_leaves((self.inputs, self.labels), _is_whole)
        for leaf in tree_leaves([leaf.values if isinstance(leaf, EntryParts) else leaf for leaf in leaves], _is_whole):
            leaf = _by_samples(leaf)
            if isinstance(leaf, Tensor) and leaf.dim():
                try:
                    rows = leaf.detach().numpy()
                except (TypeError, RuntimeError):
                    return math.nan
                for row in (rows[0], rows[-1]):
                    digest = crc32(row.ravel()[:DIGESTED].tobytes(), digest)
        return float(digest)

    def backward(self) -> None:
        """After all microbatches: passes gradients of the inputs on into the graphs that made these inputs."""
        reached = [(part, leaf.grad) for part, leaf in self.leaves if leaf.grad is not None]
        if reached:
            torch.autograd.backward([part for part, _ in reached], [gradient for _, gradient in reached])


def _dims(leaf: object) -> object:
    if isinstance(leaf, EntryParts):
        return _dims(leaf.values[0])
    if isinstance(leaf, Whole | Along):
        dim = leaf.dim if isinstance(leaf, Along) else None
        return tree_map(
            lambda each: dim % each.dim() if dim is not None and isinstance(each, Tensor) else -1, leaf.value
        )
    return 0 if isinstance(leaf, Tensor) and leaf.dim() else -1


def _unwrapped(leaf: object) -> object:
    if isinstance(leaf, EntryParts):
        return [_unwrapped(part) for part in leaf.values]
    return leaf.value if isinstance(leaf, Whole | Along) else leaf


def _by_samples(leaf: object) -> object:
    """The first tensor of an Along entry with its samples along dim 0; any other leaf."""
    if not isinstance(leaf, Along):
        return leaf
    return next(each.movedim(leaf.dim, 0) for each in tree_leaves(leaf.value) if isinstance(each, Tensor))


def as_pair(batch: object) -> tuple[object, object]:
    """A batch as inputs and labels. Raises UsageError if it is not such a pair."""
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        raise UsageError(f"a batch must be (inputs, labels), got {no_pair(batch)}")
    inputs, labels = batch
    return inputs, labels


def next_of(data_iter: Iterator[object]) -> object:
    """Takes one batch off `data_iter`. Raises UsageError if it is not an iterator or has ended."""
    if not isinstance(data_iter, Iterator):
        kind, parts = type(data_iter).__name__, data_iter if isinstance(data_iter, tuple | list) else [data_iter]
        is_batch = isinstance(data_iter, Mapping | Divided) or any(isinstance(part, Tensor) for part in parts)
        what = f"the batch itself, a {kind}: pass iter([batch])" if is_batch else f"{kind}: pass iter(loader)"
        raise UsageError(f"data_iter must be an iterator, got {what}")
    batch = next(data_iter, None)
    if batch is None:
        raise UsageError("data_iter has no batch left: make a new one, iter(loader), for every epoch")
    return batch


def as_batch(
    batch: object,
    microbatches: int,
    device: torch.device,
    read: Callable[[object], tuple[object, object]] = as_pair,
) -> Batch:
    """Prepares to split a batch into microbatches. `read` turns it, or each microbatch of a divided one, into
    `(inputs, labels)`.

    Sizes are those of `torch.tensor_split` (13 samples into 6: 3,2,2,2,2,2). A batch with fewer samples than
    `microbatches` gets one microbatch per sample.

    Raises UsageError if the batch is not such a pair, and if its tensors differ in dim 0 or have no samples.
    """
    if isinstance(batch, Divided):
        pairs = [read(each) for each in batch]
        is_leaf = _is_no_dict if batch.own else _is_whole
        inputs, labels = (joined(trees, is_leaf) for trees in zip(*pairs, strict=True))
        sizes = [1] * len(pairs) if batch.own else list(map(_samples, pairs))
        return Batch(inputs, labels, sizes, device, own=batch.own)
    inputs, labels = read(batch)
    samples = _samples((inputs, labels))
    return Batch(inputs, labels, even_sizes(samples, microbatches), device)


def even_sizes(samples: int, microbatches: int) -> list[int]:
    """The sizes of as many microbatches, or of one for each sample if there are fewer, like `torch.tensor_split`."""
    microbatches = min(microbatches, samples)
    base, larger = divmod(samples, microbatches)
    return [base + 1] * larger + [base] * (microbatches - larger)


def _samples(pair: tuple[object, object]) -> int:
    leaves = tree_leaves(pair, _is_whole)
    lengths = {len(leaf) for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()}
    lengths |= {leaf.size() for leaf in leaves if isinstance(leaf, Along)}
    if not lengths:
        found = ", ".join(dict.fromkeys(type(leaf).__name__ for leaf in leaves)) or "nothing"
        raise UsageError(f"a batch needs a tensor with one entry per sample, got {found}: convert with torch.as_tensor")
    if len(lengths) != 1:
        raise UsageError(
            f"the tensors of a batch differ in dim 0: {sorted(lengths)}; each needs one entry per sample along dim 0, "
            "or must be wrapped: "
            "pipeflow.Along(tensor, dim) has its samples along another dim, pipeflow.Whole(tensor) has none"
        )
    [samples] = lengths
    if not samples:
        raise UsageError("the batch has no samples")
    return samples


def merge(outputs: list[object], dim: int = 0, sizes: Sequence[int] = ()) -> object:
    """The outputs of all microbatches as one: tensors are concatenated along `dim`, those of Along entries along their
    own (scalars are stacked), other objects become a list. Raises UsageError for tensors that differ in another
    dimension or are not of these `sizes` along `dim`, and for outputs of other lengths.
    """
    flattened = [tree_flatten(output, lambda tree: isinstance(tree, Along)) for output in outputs]
    for microbatch, (leaves, _) in enumerate(flattened):
        if len(leaves) != len(flattened[0][0]):
            raise UsageError(
                f"the last stage returned {len(leaves)} entries for microbatch {microbatch}, but "
                f"{len(flattened[0][0])} for microbatch 0: return the same for all, or pass return_outputs=False"
            )
    columns = zip(*(leaves for leaves, _ in flattened), strict=True)
    return tree_unflatten([_merge_leaf(list(column), dim, sizes) for column in columns], flattened[0][1])


def _merge_leaf(column: list[object], dim: int, sizes: Sequence[int]) -> object:
    alongs = [leaf for leaf in column if isinstance(leaf, Along)]
    if alongs and len(alongs) == len(column):
        return merge([each.value for each in alongs], alongs[0].dim)
    tensors = [leaf for leaf in column if isinstance(leaf, Tensor)]
    if len(tensors) < len(column):
        return column
    for tensor, size in zip(tensors, sizes, strict=False):
        if tensor.dim() and tensor.shape[dim] != size:
            raise UsageError(
                f"the last stage returned shape {tuple(tensor.shape)} for a microbatch of {size} samples, and entries "
                "of the batch have their samples along other dimensions: say along which one to join the output, with "
                "return_outputs=lambda output: pipeflow.Along(output, dim)"
            )
    for microbatch, tensor in enumerate(tensors):
        if _others(tensor, dim) != _others(tensors[0], dim):
            raise UsageError(
                f"the last stage returned shape {tuple(tensor.shape)} for microbatch {microbatch}, but "
                f"{tuple(tensors[0].shape)} for microbatch 0: outputs are concatenated along dim {dim}, so all other "
                "dimensions must be equal; pad them in the stage or in the batch, return pipeflow.Along(tensor, dim) "
                "if samples lie along another dim, or pass return_outputs=False"
            )
    return torch.cat(tensors, dim) if tensors[0].dim() else torch.stack(tensors)


def _others(tensor: Tensor, dim: int) -> list[int | None]:
    """The shape without the dimension `dim`, of which None is in the place."""
    return [size if place != dim % tensor.dim() else None for place, size in enumerate(tensor.shape)]


class Divided:
    """A batch that is divided into microbatches already, which may differ in their numbers of samples and in shapes.
    The loss is the mean over all of them, weighted as in any batch.

    >>> import torch
    >>> short, long = torch.ones(3, 5), torch.ones(1, 40)
    >>> batch = Divided([(short, torch.ones(3)), (long, torch.ones(1))])

    Args:
        microbatches: per microbatch, a batch of its samples alone, in a form that the Pipeline takes.
        schedule: the schedule that runs them, such as `BatchOrder.schedule`. None: that of the call, which must have as
            many microbatches.
        cost: the costs by which a schedule with slices cuts microbatches, such as `BatchOrder.cost`. None: those of the
            Pipeline.
        own: True if each rank has only the entries that its own stages take. Then ranks do not compare their batches,
            entries need no samples and are not split, and each microbatch counts as one sample.

    Raises UsageError if there is no microbatch, or another number than the schedule has.
    """

    __slots__ = ("cost", "microbatches", "own", "schedule")

    def __init__(
        self,
        microbatches: Sequence[object],
        schedule: Schedule | None = None,
        cost: CostModel | None = None,
        *,
        own: bool = False,
    ) -> None:
        self.microbatches, self.schedule, self.cost, self.own = list(microbatches), schedule, cost, own
        if not self.microbatches:
            raise UsageError("a divided batch needs a microbatch")
        if schedule is not None:
            self.require_fits(schedule)

    def __iter__(self) -> Iterator[object]:
        return iter(self.microbatches)

    def __len__(self) -> int:
        return len(self.microbatches)

    def require_fits(self, schedule: Schedule) -> None:
        """Raises UsageError unless the schedule has as many microbatches."""
        if len(self) != schedule.num_microbatches:
            raise UsageError(
                f"the batch is divided into {len(self)} microbatches, but schedule {schedule.name!r} has "
                f"{schedule.num_microbatches}: pass Divided(..., schedule=) one of as many"
            )


@dataclass(frozen=True, slots=True)
class EntryParts:
    """In the place of an entry of a batch: what it is in each microbatch."""

    values: list[object]


def joined(trees: Sequence[object], is_leaf: Callable[[object], bool]) -> object:
    """The trees of all microbatches as one, whose leaves are `EntryParts`; None if all are None. Raises UsageError for
    trees that differ.
    """
    flattened = [tree_flatten(tree, is_leaf) for tree in trees]
    leaves, spec = flattened[0]
    for microbatch, (_, its) in enumerate(flattened):
        if its != spec:
            raise UsageError(f"microbatch {microbatch} of a divided batch has other entries than microbatch 0")
    if all(tree is None for tree in trees):
        return None
    columns = zip(*(each for each, _ in flattened), strict=True)
    return tree_unflatten([EntryParts(list(column)) for column in columns], spec) if leaves else trees[0]
