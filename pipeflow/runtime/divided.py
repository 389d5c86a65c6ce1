"""Divided batches: those that the caller has divided into microbatches. Must not contain: how a batch is divided."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch.utils._pytree import tree_flatten, tree_unflatten

from pipeflow.core.errors import UsageError
from pipeflow.core.schedule import Schedule


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
        own: True if each rank has only the entries that its own stages take. Then ranks do not compare their batches,
            entries need no samples and are not split, and each microbatch counts as one sample.

    Raises UsageError if there is no microbatch, or another number than the schedule has.
    """

    __slots__ = ("microbatches", "own", "schedule")

    def __init__(self, microbatches: Sequence[object], schedule: Schedule | None = None, *, own: bool = False) -> None:
        self.microbatches, self.schedule, self.own = list(microbatches), schedule, own
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
class Parts:
    """In the place of an entry of a batch: what it is in each microbatch."""

    values: list[object]


def aligned(entries: Sequence[Any]) -> object:
    """Entries of all microbatches, as `Parts`: per name, if it is a dict of the same names; None if all are None."""
    if isinstance(entries[0], dict):
        return {name: Parts([each[name] for each in entries]) for name in entries[0]}
    return None if all(each is None for each in entries) else Parts(list(entries))


def joined(trees: Sequence[object], is_leaf: Callable[[object], bool]) -> object:
    """The trees of all microbatches as one, whose leaves are `Parts`; None if all are None. Raises UsageError for trees
    that differ.
    """
    flattened = [tree_flatten(tree, is_leaf) for tree in trees]
    leaves, spec = flattened[0]
    for microbatch, (_, its) in enumerate(flattened):
        if its != spec:
            raise UsageError(f"microbatch {microbatch} of a divided batch has other entries than microbatch 0")
    if all(tree is None for tree in trees):
        return None
    columns = zip(*(each for each, _ in flattened), strict=True)
    return tree_unflatten([Parts(list(column)) for column in columns], spec) if leaves else trees[0]
