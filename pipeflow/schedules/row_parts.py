"""Rows: the parts that rows of several families are made of. Must not contain: a whole schedule."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pipeflow.core.action import Action, Entry, Kind, actions_of
from pipeflow.core.errors import UsageError
from pipeflow.core.placement import require_at_least


def part_of(kind: Kind, stage: int, number: int, slices: int) -> Action:
    """The action of `kind` for part `number` of a batch, in the order in which a stage runs the parts: microbatches, or
    if they are cut, their slices. Forwards take the slices of a microbatch in order. Backwards begin with the last one,
    since the gradient of its keys and values goes to the slices before it.
    """
    if slices == 1:
        return Action(kind, stage, number)
    microbatch, place = divmod(number, slices)
    return Action(kind, stage, microbatch, place if kind is Kind.F else slices - 1 - place)


def parts(kind: Kind, stage: int, microbatches: int, slices: int) -> list[Action]:
    """The actions of `kind` on a stage, in the order in which it runs them."""
    return [part_of(kind, stage, number, slices) for number in range(microbatches * slices)]


def in_groups(kind: Kind, stages: Iterable[int], microbatches: int, *, group: int, slices: int = 1) -> list[Action]:
    """The actions of `kind` for a group of `group` parts on the first of `stages`, then on the next stage, and so on;
    then for the next group. The last group is padded with microbatches that do not exist: see `existing`.
    """
    stages = tuple(stages)
    return [
        part_of(kind, stage, first + offset, slices)
        for first in range(0, microbatches * slices, group)
        for stage in stages
        for offset in range(group)
    ]


def lead(forwards: Sequence[Action], backwards: Sequence[Action]) -> int:
    """How many forwards a rank must run before it begins with forwards and backwards in turn, so that each backward
    comes after the forward of its stage and part.
    """
    places = {forward.work: place for place, forward in enumerate(forwards)}
    needed = (places[each.work] - turn for turn, each in enumerate(backwards) if each.work in places)
    return max(needed, default=0)


def in_turn(
    warmup: int,
    forwards: Sequence[Action],
    backwards: Sequence[Action],
    weights: Sequence[Action] = (),
    *,
    lag: int = 0,
) -> list[Action]:
    """`warmup` forwards, then forwards and backwards in turn, then the remaining backwards.

    If backwards are in halves, `backwards` has the input-gradient halves and `weights` the weight-gradient halves: one
    per turn, `lag` turns later.
    """
    row = list(forwards[:warmup])
    for turn, backward in enumerate(backwards):
        row += forwards[warmup + turn : warmup + turn + 1]
        row.append(backward)
        if turn >= lag:
            row += weights[turn - lag : turn - lag + 1]
    return row + list(weights[max(len(backwards) - lag, 0) :])


def existing(row: Iterable[Entry], microbatches: int) -> tuple[Entry, ...]:
    """The row without microbatches that do not exist. A pair that loses one action becomes the other one.

    A sound schedule stays sound when a microbatch is taken out.
    """
    kept: list[Entry] = []
    for entry in row:
        actions = actions_of(entry)
        left = tuple(action for action in actions if action.microbatch < microbatches)
        kept += (entry,) if left == actions else left
    return tuple(kept)


def group_size(group: int | None, *, ranks: int, microbatches: int, least: int) -> int:
    """The number of microbatches in a group: `group`, or `ranks` if that is None. Groups larger than the number of
    microbatches are all the same, so the size is limited.

    Raises UsageError for a group smaller than `least`, which would wait for itself.
    """
    group = ranks if group is None else group
    require_at_least(least, group=group)
    return min(group, max(ranks, microbatches))


def require_even(name: str, ranks: int) -> None:
    """Raises UsageError for an odd number of ranks: with two directions, the middle rank would meet itself."""
    if ranks % 2:
        raise UsageError(f"schedule {name!r} runs in two directions and needs an even number of ranks, got {ranks}")
