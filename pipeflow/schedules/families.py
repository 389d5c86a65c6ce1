"""Families: the schedules whose order follows from their sizes alone, and the orders that searches start from. Must not
contain: what is searched for.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from types import MappingProxyType

from pipeflow.core.action import Action, Kind
from pipeflow.core.errors import UsageError
from pipeflow.core.placement import Placement
from pipeflow.core.schedule import Schedule
from pipeflow.schedules.controllable import v_half, v_min
from pipeflow.schedules.dualpipe import dualpipe, dualpipe_v
from pipeflow.schedules.gis import gis, gis_h
from pipeflow.schedules.gpipe import gpipe
from pipeflow.schedules.interleaved import interleaved_one_f_one_b
from pipeflow.schedules.interleaved_zb import grouped_row, interleaved_zb
from pipeflow.schedules.looped_bfs import looped_bfs
from pipeflow.schedules.one_f_one_b import eager_one_f_one_b, one_f_one_b
from pipeflow.schedules.waves import chimera, hanayo
from pipeflow.schedules.zb_v import zb_v
from pipeflow.schedules.zero_bubble import zb_h1, zb_h2

FAMILIES: Mapping[str, Callable[..., Schedule]] = MappingProxyType(
    {
        "gpipe": gpipe,
        "1f1b": one_f_one_b,
        "eager-1f1b": eager_one_f_one_b,
        "interleaved-1f1b": interleaved_one_f_one_b,
        "looped-bfs": looped_bfs,
        "zb-h1": zb_h1,
        "zb-h2": zb_h2,
        "zb-v": zb_v,
        "v-half": v_half,
        "v-min": v_min,
        "interleaved-zb": interleaved_zb,
        "gis": gis,
        "gis-h": gis_h,
        "chimera": chimera,
        "hanayo": hanayo,
        "dualpipe": dualpipe,
        "dualpipe-v": dualpipe_v,
    }
)
"""The functions that make these schedules, by the schedules' names."""


@cache
def keywords(function: Callable[..., Schedule]) -> tuple[str, ...]:
    """The names of the options of a function that makes schedules."""
    parameters = inspect.signature(function).parameters.values()
    return tuple(parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY)


def schedules_on(placement: Placement, microbatches: int, slices: int = 1) -> Iterator[Schedule]:
    """The schedules of all families with this placement, one of each name: with the chunks or waves of the placement,
    and otherwise default options. Ranks may be numbered in another order. With several slices per microbatch, those of
    the families that cut microbatches.
    """
    ranks, cut = placement.in_turn, {"slices": slices} if slices > 1 else {}
    for make in FAMILIES.values():
        if not {*cut} <= {*keywords(make)}:
            continue
        for options in sizes_on(make, placement):
            try:
                if make(placement.num_ranks, 1, **options).placement.with_ranks(ranks) == placement:
                    yield make(placement.num_ranks, microbatches, **options, **cut).with_ranks(ranks)
                    break
            except UsageError:  # it has no such size
                continue


def sizes_on(make: Callable[..., Schedule], placement: Placement) -> Iterator[dict[str, int]]:
    """The options under which a family may have a placement; those that it needs not first."""
    known, per_rank = keywords(make), placement.num_stages // placement.num_ranks
    yield {}
    if "chunks" in known:
        yield {"chunks": per_rank}
    if "waves" in known:
        yield {"waves": max(per_rank // 2, 1)}


def groups_on(placement: Placement, microbatches: int) -> Iterator[Schedule]:
    """`gis` in groups of every size, if it has this placement. In smaller groups ranks keep less, and are idle longer.
    Each also comes with later weight-gradient halves, as in `interleaved-zb`: on all ranks, or on the second half of
    them, which keep less than the others.
    """
    ranks = placement.num_ranks
    chunks = placement.num_stages // ranks
    if chunks == 1 or placement != Placement.looped(ranks, chunks):
        return
    for group in range(-(-ranks // 2), ranks + 1):
        for first in (ranks, ranks // 2, 0):
            lags = [max(rank - first, 0) for rank in range(ranks)]
            rows = [
                grouped_row(ranks, microbatches, chunks, rank, group=group, lag=lag) for rank, lag in enumerate(lags)
            ]
            yield Schedule(f"groups of {group}", placement, microbatches, tuple(rows))


def repeated_on(placement: Placement, microbatches: int) -> Iterator[Schedule]:
    """Orders that repeat, for a placement of one path with several stages per rank: with backwards at once, and after
    one or two thirds of a period.

    In the period each rank runs F, I and W of each of its stages, each for a unit of time. All of a microbatch runs as
    early as this allows, in its order: software pipelining by modulo scheduling (M. Lam, Software pipelining, PLDI
    1988). What is saved stays for the same time on each rank in all periods, so a link to the host that keeps up once
    always does: the uniform repeat of PipeOffload (arXiv 2503.01328) is of this kind.
    """
    most = max(len(placement.stages_of(rank)) for rank in range(placement.num_ranks))
    if len(placement.paths) > 1 or most == 1:
        return
    for pause in (0, most, 2 * most):
        starts = _starts(placement, 3 * most, pause)
        timed = [
            (start + 3 * most * microbatch, placement.paths[0][stage], Action(kind, stage, microbatch))
            for (kind, stage), start in starts.items()
            for microbatch in range(microbatches)
        ]
        timed.sort(key=lambda each: each[0])
        rows = (tuple(action for _, on, action in timed if on == rank) for rank in range(placement.num_ranks))
        yield Schedule(f"repeated, backwards after {pause}", placement, microbatches, tuple(rows))


def _starts(placement: Placement, period: int, pause: int) -> dict[tuple[Kind, int], int]:
    """When each action of the first microbatch starts."""
    free = [[True] * period for _ in range(placement.num_ranks)]
    starts: dict[tuple[Kind, int], int] = {}

    def run(kind: Kind, stage: int, earliest: int) -> int:
        """Puts an action into the first free slot of its rank from `earliest` on. Returns when it ends."""
        own, start = free[placement.paths[0][stage]], earliest
        while not own[start % period]:
            start += 1
        own[start % period], starts[kind, stage] = False, start
        return start + 1

    now = 0
    for stage in range(placement.num_stages):
        now = run(Kind.F, stage, now)
    now += pause
    for stage in reversed(range(placement.num_stages)):
        now = run(Kind.I, stage, now)
        run(Kind.W, stage, now)
    return starts
