"""Microbatches: splits batches and merges outputs. Only this file looks into the structure of what users pass in."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from pipeflow.core.errors import UsageError
from pipeflow.runtime.divided import Divided, Parts, aligned, joined

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


def _is_whole(tree: object) -> bool:
    return isinstance(tree, Whole | Parts)


@dataclass(frozen=True, slots=True)
class Batch:
    """One batch, which `split` divides into microbatches.

    Attributes:
        inputs, labels: trees of tensors and other objects.
        sizes: number of samples in each microbatch.
        device: device to which `split` moves tensors.
        own: whether other ranks have other entries, so that digests are not compared.
        leaves: inputs that require gradients: each part of the batch, and the leaf that a microbatch uses instead.
    """

    inputs: object
    labels: object
    sizes: list[int]
    device: torch.device
    own: bool = False
    leaves: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # of inputs that require gradients

    @property
    def named(self) -> dict[str, object]:
        """The entries of dict inputs, which stages receive by name; empty for other inputs."""
        return self.inputs if isinstance(self.inputs, dict) else {}

    def require_taken(self, names: frozenset[str]) -> None:
        """Raises UsageError for tensors of dict inputs whose names are not in `names`, the names that stages take."""
        for name in self.named.keys() - names:
            if any(isinstance(leaf, Tensor | Whole | Parts) for leaf in tree_leaves(self.named[name], _is_whole)):
                raise UsageError(
                    f"no stage takes the batch's entry {name!r}: stages take {sorted(names)}; make it a parameter of "
                    "a stage's forward, or remove it from the inputs"
                )

    def split(self, tree: object) -> list[Any]:
        """Splits a tree into one part per microbatch. Tensors are split along dim 0; Whole entries, scalars and other
        objects are passed whole. Entries of a divided batch have their parts already. Tensors that require a gradient
        become leaves of each microbatch's own graph.
        """
        leaves, spec = tree_flatten(tree, _is_whole)
        parts = [self._parts(leaf) for leaf in leaves]
        if spec.is_leaf():
            return list(parts[0])
        return [tree_unflatten([part[index] for part in parts], spec) for index in range(len(self.sizes))]

    def _parts(self, leaf: object) -> Sequence[object]:
        leaves, spec = tree_flatten(_unwrapped(leaf))
        moved = [self._moved(each) for each in leaves]
        whole: Any = tree_unflatten(moved, spec)
        if isinstance(leaf, Parts):
            parts: Sequence[object] = whole
        elif isinstance(leaf, Tensor) and leaf.dim():
            parts = whole.split(self.sizes)
        else:
            parts = [whole] * len(self.sizes)
        wants = any(isinstance(each, Tensor) and each.requires_grad for each in moved)
        return [tree_map(self._leaf, part) for part in parts] if wants else parts

    def _moved(self, value: object) -> object:
        on_gpu = self.device.type == "cuda"  # a copy to the CPU must be complete before it is read
        return value.to(self.device, non_blocking=on_gpu) if isinstance(value, Tensor) else value

    def _leaf(self, part: object) -> object:
        if not isinstance(part, Tensor) or not part.requires_grad:
            return part
        leaf = part.detach().requires_grad_()
        self.leaves.append((part, leaf))
        return leaf

    def digest(self) -> float:
        """A digest of the first and the last row of every tensor. It is nan if a tensor is not in CPU memory, or has a
        dtype that only torch can read, and if each rank has its own entries.
        """
        if self.own:
            return math.nan
        digest = 0
        leaves = tree_leaves((self.inputs, self.labels), _is_whole)
        for leaf in tree_leaves([leaf.values if isinstance(leaf, Parts) else leaf for leaf in leaves], _is_whole):
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


def _unwrapped(leaf: object) -> object:
    if isinstance(leaf, Parts):
        return [_unwrapped(part) for part in leaf.values]
    return leaf.value if isinstance(leaf, Whole) else leaf


def as_pair(batch: object) -> tuple[object, object]:
    """A batch as inputs and labels. Raises UsageError if it is not such a pair."""
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        kind = type(batch).__name__
        raise UsageError(f"a batch must be (inputs, labels), got {kind}; without labels pass (inputs, None)")
    inputs, labels = batch
    return inputs, labels


def next_of(data_iter: Iterator[object]) -> object:
    """Takes one batch off `data_iter`. Raises UsageError if it is not an iterator or has ended."""
    if not isinstance(data_iter, Iterator):
        raise UsageError(f"data_iter must be an iterator, got {type(data_iter).__name__}: pass iter(loader)")
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
        if batch.own:
            inputs, labels = map(aligned, zip(*pairs, strict=True))
            return Batch(inputs, labels, [1] * len(pairs), device, own=True)
        inputs, labels = (joined(trees, _is_whole) for trees in zip(*pairs, strict=True))
        return Batch(inputs, labels, list(map(_samples, pairs)), device)
    inputs, labels = read(batch)
    samples = _samples((inputs, labels))
    microbatches = min(microbatches, samples)
    base, larger = divmod(samples, microbatches)
    sizes = [base + 1] * larger + [base] * (microbatches - larger)
    return Batch(inputs, labels, sizes, device)


def _samples(pair: tuple[object, object]) -> int:
    """The number of samples of inputs and labels."""
    leaves = tree_leaves(pair, _is_whole)
    lengths = {len(leaf) for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()}
    if len(lengths) != 1:
        found = f"differ in dim 0: {sorted(lengths)}" if lengths else "are missing"
        raise UsageError(
            f"the tensors of a batch {found}; each needs one entry per sample along dim 0, or must be "
            "wrapped in pipeflow.Whole"
        )
    [samples] = lengths
    if not samples:
        raise UsageError("the batch has no samples")
    return samples


def merge(outputs: list[object]) -> object:
    """The outputs of all microbatches as one: tensors are concatenated along dim 0 (scalars are stacked), other objects
    become a list. Raises UsageError for tensors that differ in another dimension, and for outputs of other lengths.
    """
    flattened = [tree_flatten(output) for output in outputs]
    for microbatch, (leaves, _) in enumerate(flattened):
        if len(leaves) != len(flattened[0][0]):
            raise UsageError(
                f"the last stage returned {len(leaves)} entries for microbatch {microbatch}, but "
                f"{len(flattened[0][0])} for microbatch 0: return the same for all, or pass return_outputs=False"
            )
    columns = zip(*(leaves for leaves, _ in flattened), strict=True)
    return tree_unflatten([_merge_leaf(list(column)) for column in columns], flattened[0][1])


def _merge_leaf(column: list[object]) -> object:
    tensors = [leaf for leaf in column if isinstance(leaf, Tensor)]
    if len(tensors) < len(column):
        return column
    for microbatch, tensor in enumerate(tensors):
        if tensor.dim() != tensors[0].dim() or tensor.shape[1:] != tensors[0].shape[1:]:
            raise UsageError(
                f"the last stage returned shape {tuple(tensor.shape)} for microbatch {microbatch}, but "
                f"{tuple(tensors[0].shape)} for microbatch 0: outputs are concatenated along dim 0, so all other "
                "dimensions must be equal; pad them in the stage or in the batch, or pass return_outputs=False"
            )
    return torch.cat(tensors) if tensors[0].dim() else torch.stack(tensors)


def snapshot(tree: object) -> object:
    """The same tree with detached tensors, which are copied if they may be overwritten later."""
    return tree_map(lambda leaf: _snapshot(leaf) if isinstance(leaf, Tensor) else leaf, tree)


def _snapshot(tensor: Tensor) -> Tensor:
    return tensor.detach().clone() if may_be_overwritten(tensor) else tensor.detach()


def may_be_overwritten(tensor: Tensor) -> bool:
    """Returns True if the tensor's memory may be overwritten after a stage has returned it, as in a static buffer. This
    may happen if it was written in place before, or if it belongs to no graph and another object holds its memory, too.
    """
    if tensor.is_inference() or tensor._version:
        return True
    return tensor.grad_fn is None and tensor.layout is torch.strided and _holders(tensor) > 1


def _holders(tensor: Tensor) -> int:
    """The number of tensors that share its memory, including itself."""
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata) - 1  # `storage` holds it, too
