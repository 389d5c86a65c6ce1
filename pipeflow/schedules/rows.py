"""What the rows of several families are made of. What must not live here: a schedule."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pipeflow.core.action import Action, Entry, Kind, actions_of
from pipeflow.core.errors import UsageError
from pipeflow.core.placement import require_at_least


def in_groups(kind: Kind, stages: Iterable[int], microbatches: int, *, group: int) -> list[Action]:
    """`group` microbatches through the first of `stages`, then through the next, and so on; then the next group.

    The last group is filled up, with microbatches that do not exist: see `existing`.
    """
    stages = tuple(stages)
    firsts = range(0, microbatches, group)
    return [Action(kind, stage, first + offset) for first in firsts for stage in stages for offset in range(group)]


def in_turn(
    warmup: int,
    forwards: Sequence[Action],
    backwards: Sequence[Action],
    weights: Sequence[Action] = (),
    *,
    lag: int = 0,
) -> list[Action]:
    """`warmup` forwards, then a forward and a backward in turn, then the remaining backwards.

    Where backwards are in halves, `weights` are the weight-gradient halves: one a turn, `lag` turns behind.
    """
    row = list(forwards[:warmup])
    for turn, backward in enumerate(backwards):
        row += forwards[warmup + turn : warmup + turn + 1]
        row.append(backward)
        if turn >= lag:
            row += weights[turn - lag : turn - lag + 1]
    return row + list(weights[max(len(backwards) - lag, 0) :])


def existing(row: Iterable[Entry], microbatches: int) -> tuple[Entry, ...]:
    """`row` without the microbatches that do not exist; half of a pair may be left.

    Taking a microbatch out of a sound schedule leaves it sound.
    """
    kept: list[Entry] = []
    for entry in row:
        actions = actions_of(entry)
        left = tuple(action for action in actions if action.microbatch < microbatches)
        kept += (entry,) if left == actions else left
    return tuple(kept)


def group_size(group: int | None, *, ranks: int, microbatches: int, least: int) -> int:
    """The microbatches of a group: `ranks` unless given; larger groups than there are microbatches are all the same.

    Raises UsageError below `least`, where a group would wait for itself.
    """
    group = ranks if group is None else group
    require_at_least(least, group=group)
    return min(group, max(ranks, microbatches))


def require_even(name: str, ranks: int) -> None:
    """Raises UsageError for an odd number of ranks: with two directions, the middle rank would meet itself."""
    if ranks % 2:
        raise UsageError(f"schedule {name!r} runs in two directions and needs an even number of ranks, got {ranks}")
