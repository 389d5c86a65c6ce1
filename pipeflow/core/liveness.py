"""Liveness: which values each action makes a rank keep or free; and how much it may keep, as users write it. The former
follows from the table of `dataflow`. Must not contain: when actions run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from pipeflow.core.action import Action
from pipeflow.core.dataflow import DATAFLOW, KEPT, Content, DataflowRow
from pipeflow.core.errors import UsageError


class MemoryChange(NamedTuple):
    """The change of memory by a kind of action.

    Attributes:
        from_start, from_end: contents that are kept from its start on, and from its end on.
        frees: contents that are freed at its end.
    """

    from_start: tuple[Content, ...]
    from_end: tuple[Content, ...]
    frees: tuple[Content, ...]

    @classmethod
    def of(cls, flow: DataflowRow) -> MemoryChange:
        made = tuple(content for content, _ in flow.makes if content in KEPT)
        used = tuple(flow.needs_only or content for content, _ in flow.needs if content in KEPT)
        return cls((), made, used) if flow.in_place else cls(made, (), used)

    def replaced(self, contents: Mapping[Content, Content]) -> MemoryChange:
        """The change if other contents are kept in place of some."""
        return MemoryChange(*(tuple(contents.get(each, each) for each in part) for part in self))

    def net(self, content: Content) -> int:
        """By how much the action changes the number of values of `content`."""
        return (self.from_start + self.from_end).count(content) - self.frees.count(content)


CHANGES = {kind: MemoryChange.of(flow) for kind, flow in DATAFLOW.items()}
_LESS = {content: flow.needs_only for flow in DATAFLOW.values() if flow.needs_only for content, _ in flow.needs}
REDUCED = {kind: change.replaced(_LESS) for kind, change in CHANGES.items()}
"""The changes by actions before one that makes again what they make, such as a recomputation."""
ACTIVATIONS = {kind: change.net(Content.SAVED) for kind, change in CHANGES.items()}
"""Per kind of action, by how much it changes the number of activations that a rank keeps."""


def memory_changes(actions: Sequence[Action]) -> list[MemoryChange]:
    """Per action of a rank, in order, how it changes memory. The changes are those of `REDUCED` before the last action
    that makes again what earlier ones of its stage and microbatch made, such as a recomputation.
    """
    again = {action.work: position for position, action in enumerate(actions) if DATAFLOW[action.kind].needs_only}
    return [
        (REDUCED if position < again.get(action.work, 0) else CHANGES)[action.kind]
        for position, action in enumerate(actions)
    ]


MemoryCap = float | Sequence[float]
"""The most activations that a rank may keep, in microbatches of its whole share of the model: one number for all ranks,
or one per rank."""


def cap_per_rank(memory_cap: MemoryCap, least: Sequence[float], name: str = "memory_cap") -> list[float]:
    """The cap of every rank. For errors, `least` is what each rank needs, and `name` that of the cap. Raises UsageError
    unless `memory_cap` is one number, or one per rank, and all are positive.
    """
    caps = list(memory_cap) if isinstance(memory_cap, Sequence) else [memory_cap] * len(least)
    if len(caps) != len(least):
        raise UsageError(f"{name} is one number, or one for each of {len(least)} ranks; got {len(caps)} of them")
    for rank, cap in enumerate(caps):
        if not cap > 0:
            raise UsageError(f"{name} must be positive, got {cap} for rank {rank}: it needs {least[rank]:g} there")
    return caps
