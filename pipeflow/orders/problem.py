"""What a search for an order is given, flattened into numbers; how words become schedules, and when they run.

A row in a search is a word of letters: the letter `3 * stage + half` is the next F (half 0), I (1) or W (2) of a
stage. Microbatches are alike and every letter meets them in order, so a word says all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import floor

from pipeflow.core.action import Action, Kind
from pipeflow.core.cost import CostModel
from pipeflow.core.errors import UsageError
from pipeflow.core.placement import Placement, require_positive
from pipeflow.core.schedule import Schedule

HALVES = (Kind.F, Kind.I, Kind.W)
ROUNDING = 1e-9  # by which a cap of, say, 2/3 of a share of 3 chunks may miss a whole number
Word = list[int]
MemoryCap = float | Sequence[float] | None


@dataclass(frozen=True, slots=True)
class Problem:
    """Per letter its `durations`, the letter whose value it waits for (`source`, -1 for none) and how long that value
    travels (`delays`); per rank its stages in ascending order and how many chunk activations it may keep (`slots`).
    """

    placement: Placement
    many: int  # microbatches
    ranks: tuple[int, ...]  # per stage
    stages: tuple[tuple[int, ...], ...]  # per rank
    durations: tuple[float, ...]
    source: tuple[int, ...]
    delays: tuple[float, ...]
    slots: tuple[int, ...]

    @property
    def work(self) -> tuple[float, ...]:
        """Per rank, how long it is busy."""
        return tuple(
            self.many * sum(sum(self.durations[3 * stage : 3 * stage + 3]) for stage in held) for held in self.stages
        )


def problem(placement: Placement, microbatches: int, cost: CostModel, memory_cap: MemoryCap = None) -> Problem:
    """Raises UsageError for a placement of two paths, a stage without a cost, and a cap under which some rank cannot
    keep one microbatch on all of its stages.
    """
    require_positive(microbatches=microbatches)
    if len(placement.paths) > 1:
        raise UsageError("a search takes placements of one path; this one has two")
    (path,) = placement.paths
    last = len(path) - 1
    source, delays = [], []
    for stage in range(len(path)):
        source += [3 * (stage - 1) if stage else -1, 3 * (stage + 1) + 1 if stage < last else 3 * stage, 3 * stage + 1]
        delays += [_transfer(cost, path, stage - 1, stage) if stage else 0.0]
        delays += [_transfer(cost, path, stage + 1, stage) if stage < last else 0.0, 0.0]
    return Problem(
        placement,
        microbatches,
        path,
        tuple(map(placement.stages_of, range(placement.num_ranks))),
        tuple(float(cost.duration(kind, stage)) for stage in range(len(path)) for kind in HALVES),
        tuple(source),
        tuple(delays),
        _slots(placement, microbatches, memory_cap),
    )


def _transfer(cost: CostModel, path: Sequence[int], maker: int, user: int) -> float:
    """The time between the ranks of two neighbouring stages; a gradient is as large as its activation."""
    return 0.0 if path[maker] == path[user] else float(cost.transfer(min(maker, user), path[maker], path[user]))


def _slots(placement: Placement, microbatches: int, memory_cap: MemoryCap) -> tuple[int, ...]:
    share = placement.chunks_per_rank
    chunks = [len(placement.stages_of(rank)) for rank in range(placement.num_ranks)]
    if memory_cap is None:
        return tuple(microbatches * number for number in chunks)
    caps = list(memory_cap) if isinstance(memory_cap, Sequence) else [memory_cap] * len(chunks)
    if len(caps) != len(chunks):
        raise UsageError(f"memory_cap needs one number, or one for each of the {len(chunks)} ranks; got {len(caps)}")
    for rank, (cap, number) in enumerate(zip(caps, chunks, strict=True)):
        if not cap * share + ROUNDING >= number:
            raise UsageError(
                f"memory_cap {cap:g} is too small: rank {rank} needs at least {number / share:g}, for one microbatch"
            )
    return tuple(
        floor(min(cap * share + ROUNDING, microbatches * number)) for cap, number in zip(caps, chunks, strict=True)
    )


def to_schedule(name: str, given: Problem, words: Sequence[Word]) -> Schedule:
    """The schedule that `words`, one per rank, are."""
    rows = []
    for word in words:
        count = [0] * len(given.durations)
        row = []
        for letter in word:
            row.append(Action(HALVES[letter % 3], letter // 3, count[letter]))
            count[letter] += 1
        rows.append(tuple(row))
    return Schedule(name, given.placement, given.many, tuple(rows))


def to_words(schedule: Schedule) -> list[Word]:
    """The words of a schedule, a full backward taken as its two halves and every microbatch as any other; reductions,
    which hold up no rank, are left out.
    """
    words = []
    for rank in range(len(schedule.rows)):
        word: Word = []
        for action in schedule.actions(rank):
            first = 3 * action.stage
            match action.kind:
                case Kind.F:
                    word.append(first)
                case Kind.I:
                    word.append(first + 1)
                case Kind.W:
                    word.append(first + 2)
                case Kind.B:
                    word += [first + 1, first + 2]
                case Kind.R:
                    pass
        words.append(word)
    return words
