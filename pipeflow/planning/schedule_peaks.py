"""Peaks: the most that each rank of a schedule keeps for its backwards, derived from its rows alone. Must not contain:
times.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pipeflow.core.action import Action
from pipeflow.core.dataflow import DATAFLOW, Content
from pipeflow.core.liveness import MemoryChange, memory_changes
from pipeflow.core.schedule import Schedule

Counts = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RankPeaks:
    """The fullest states of one rank.

    Attributes:
        values: the kinds of values that the rank keeps, as (content, stage).
        states: per state, how many of each of these values the rank keeps at once. Every other state keeps at most as
            many of each value as one of these states.
    """

    values: tuple[tuple[Content, int], ...]
    states: tuple[Counts, ...]

    def bytes(self, sizes: Mapping[Content, Sequence[float]]) -> float:
        """The most bytes kept at once; `sizes` has the bytes per content and stage."""
        each = [sizes[content][stage] if content in sizes else 0.0 for content, stage in self.values]
        return max(
            (sum(count * size for count, size in zip(state, each, strict=True)) for state in self.states), default=0.0
        )


def peaks(schedule: Schedule) -> tuple[RankPeaks, ...]:
    """Per rank, its fullest states. For a schedule with backwards, their bytes are the `peak_bytes` of its timelines. A
    rank computes one action after another, so times do not matter.
    """
    return tuple(_of_rank(list(schedule.actions(rank))) for rank in range(len(schedule.rows)))


def with_gradients(
    row: Sequence[Action], sizes: Mapping[Content, Sequence[float]], gradients: Mapping[int, float]
) -> tuple[float, float]:
    """The bytes that a rank keeps for backwards, and those of whole gradients, at the moment when both together are
    most. A stage's `gradients` are whole from its first backward to its last.
    """
    makes = [any(content is Content.WEIGHT_GRADIENT for content, _ in DATAFLOW[each.kind].makes) for each in row]
    backwards = [(each.stage, position) for position, each in enumerate(row) if makes[position]]
    last, begun = dict(backwards), set[int]()
    kept = whole = 0.0
    most = kept, whole

    def bytes_of(contents: Sequence[Content], stage: int) -> float:
        return sum(sizes[content][stage] for content in contents if content in sizes)

    for position, (change, action) in enumerate(zip(memory_changes(row), row, strict=True)):
        stage = action.stage
        kept += bytes_of(change.from_start, stage)
        if makes[position] and stage not in begun:
            begun.add(stage)
            whole += gradients[stage]
        most = max(most, (kept, whole), key=sum)
        kept += bytes_of(change.from_end, stage) - bytes_of(change.frees, stage)
        if last.get(stage) == position:
            whole -= gradients[stage]
    return most


def _of_rank(row: Sequence[Action]) -> RankPeaks:
    places: dict[tuple[Content, int], int] = {}
    steps: dict[tuple[MemoryChange, int], tuple[list[int], list[int], list[int]]] = {}
    each = [(change, action.stage) for change, action in zip(memory_changes(row), row, strict=True)]
    for change, stage in dict.fromkeys(each):
        begins, comes, goes = (
            [places.setdefault((content, stage), len(places)) for content in contents]
            for contents in (change.from_start, change.from_end, change.frees)
        )
        steps[change, stage] = begins, comes, goes
    counts, seen, rises = [0] * len(places), set(), False
    for step in each:
        begins, comes, goes = steps[step]
        for place in begins:
            counts[place] += 1
        rises = rises or bool(begins)
        if goes and rises:
            seen.add(tuple(counts))
            rises = False
        for place in goes:
            counts[place] -= 1
        for place in comes:
            counts[place] += 1
        rises = rises or bool(comes)
    return RankPeaks(tuple(places), tuple(_undominated(seen)))


def _undominated(states: set[Counts]) -> list[Counts]:
    """The states that no other one exceeds in all counts."""
    kept: list[Counts] = []
    for state in sorted(states, key=lambda counts: (-sum(counts), counts)):
        if not any(all(map(int.__ge__, other, state)) for other in kept):
            kept.append(state)
    return kept
