"""Recognised: the names under which the registry makes a schedule. Must not contain: orders."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from pipeflow.core.action import Kind, actions_of
from pipeflow.core.dataflow import SEVERAL
from pipeflow.core.errors import UsageError
from pipeflow.core.placement import Placement
from pipeflow.core.schedule import Schedule
from pipeflow.schedules.families import sizes_on
from pipeflow.schedules.registry import SCHEDULES, is_searched, make_schedule, options_of

LARGEST = 4096  # stages times microbatches, so that comparing takes no second
KINDS = list(Kind)

Rows = tuple[tuple[tuple[int, ...], ...], ...]
Options = dict[str, int]


def recognised(schedule: Schedule) -> tuple[str, ...]:
    """The named schedules, with the options that they need, that have the rows of `schedule`: such as "1f1b" and
    "interleaved-1f1b with chunks=1". Microbatches may be numbered in another order; reductions do not count. Each name
    stands there at most once, without options if it needs none. Empty also for schedules that are very large.
    """
    rows = _alike(schedule)
    large = schedule.placement.num_stages * schedule.num_microbatches > LARGEST
    return () if rows is None or large else _known(schedule.placement, schedule.num_microbatches).get(rows, ())


def _alike(schedule: Schedule) -> Rows | None:
    """The rows as numbers, which are equal for schedules that differ only in the numbers of microbatches. Microbatches
    are renumbered in the order in which they begin, separately for each path. None if one does not begin exactly once.
    """
    paths, stages, many = schedule.placement.paths, schedule.placement.num_stages, schedule.num_microbatches
    numbers: dict[int, int] = {}
    begun = [0] * len(paths)
    firsts = {path[0] for path in paths}
    for rank in firsts:
        for action in schedule.actions(rank):
            path = action.microbatch % len(paths)
            if action.kind is Kind.F and action.stage == 0 and paths[path][0] == rank:
                numbers[action.microbatch] = path + begun[path] * len(paths)
                begun[path] += 1
    if sum(begun) != many or len(numbers) != many:
        return None
    first = {kind: index * stages * many for index, kind in enumerate(KINDS)}
    return tuple(
        tuple(
            tuple(first[each.kind] + each.stage * many + numbers.get(each.microbatch, -1) for each in actions_of(entry))
            for entry in row
            if actions_of(entry)[0].kind not in SEVERAL
        )
        for row in schedule.rows
    )


@lru_cache(16)
def _known(placement: Placement, microbatches: int) -> dict[Rows, tuple[str, ...]]:
    """The names of all rows that the registry has for a placement."""
    found: dict[Rows, tuple[str, ...]] = {}
    for name in SCHEDULES:
        mine: set[Rows] = set()
        for options in () if is_searched(name) else _variants(name, placement, microbatches):
            rows = _rows(name, placement, microbatches, options)
            if rows is not None and rows not in mine:
                mine.add(rows)
                said = ", ".join(f"{option}={value}" for option, value in options.items())
                found[rows] = (*found.get(rows, ()), f"{name} with {said}" if said else name)
    return found


def _rows(name: str, placement: Placement, microbatches: int, options: Options) -> Rows | None:
    """The rows of a schedule; None if it does not exist or has another placement."""
    try:
        if make_schedule(name, ranks=placement.num_ranks, microbatches=1, **options).placement != placement:
            return None
        return _alike(make_schedule(name, ranks=placement.num_ranks, microbatches=microbatches, **options))
    except UsageError:
        return None


def _variants(name: str, placement: Placement, microbatches: int) -> Iterator[Options]:
    """Options that a schedule on `placement` may have, those that it needs not first."""
    known, ranks = options_of(name), placement.num_ranks
    sizes = list(sizes_on(SCHEDULES[name], placement))
    yield from sizes
    more: list[Options] = []
    if "extra_warmup" in known:
        more += ({"extra_warmup": extra} for extra in range(1, min(microbatches, 2 * ranks)))
    if "group" in known:
        groups = (group for group in range(1, microbatches + 1) if microbatches % group == 0 or group % ranks == 0)
        more += ({"group": group} for group in groups)
    yield from ({**size, **each} for each in more for size in sizes)
