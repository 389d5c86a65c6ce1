"""The registry: the names of the families of schedules, and the function that makes a schedule by name. Must not
contain: the orders themselves.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from types import MappingProxyType

from pipeflow.core.errors import UsageError, unknown
from pipeflow.core.placement import Placement, require_positive
from pipeflow.core.schedule import Schedule
from pipeflow.schedules.controllable import v_half, v_min
from pipeflow.schedules.dualpipe import dualpipe, dualpipe_v
from pipeflow.schedules.gis import gis, gis_h
from pipeflow.schedules.gpipe import gpipe
from pipeflow.schedules.interleaved import interleaved_one_f_one_b
from pipeflow.schedules.interleaved_zb import interleaved_zb
from pipeflow.schedules.looped_bfs import looped_bfs
from pipeflow.schedules.naive import naive
from pipeflow.schedules.one_f_one_b import eager_one_f_one_b, one_f_one_b
from pipeflow.schedules.waves import chimera, hanayo
from pipeflow.schedules.zb_auto import zb_auto
from pipeflow.schedules.zb_v import zb_v
from pipeflow.schedules.zero_bubble import zb_h1, zb_h2

SCHEDULES: Mapping[str, Callable[..., Schedule]] = MappingProxyType(
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
        "zb-auto": zb_auto,
        "naive": naive,
    }
)
"""The functions that make schedules, by the schedules' names."""

COMPARED = tuple(name for name in SCHEDULES if name != "naive")
"""The schedules that are compared, planned and searched from unless others are named: "naive" only shows what they
improve on.
"""


def options_of(name: str) -> tuple[str, ...]:
    """The names of the options of the schedule `name`, besides ranks and microbatches. Raises KeyError for an unknown
    name.
    """
    return _keywords(SCHEDULES[name])


@cache
def _keywords(function: Callable[..., Schedule]) -> tuple[str, ...]:
    parameters = inspect.signature(function).parameters.values()
    return tuple(parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY)


def is_searched(name: str) -> bool:
    """Whether a search makes the schedule `name` for given costs, so that no order of its own has the name."""
    return name in SCHEDULES and "cost" in options_of(name)


def schedules_on(placement: Placement, microbatches: int) -> Iterator[Schedule]:
    """The named schedules with this placement, one of each name in `COMPARED`: with the chunks or waves of the
    placement, and otherwise default options. Those that a search makes for given costs are left out.
    """
    for name in COMPARED:
        for options in () if is_searched(name) else sizes_on(name, placement):
            try:
                if make_schedule(name, ranks=placement.num_ranks, microbatches=1, **options).placement == placement:
                    yield make_schedule(name, ranks=placement.num_ranks, microbatches=microbatches, **options)
                    break
            except UsageError:  # it has no such size
                continue


def sizes_on(name: str, placement: Placement) -> Iterator[dict[str, int]]:
    """The options under which a schedule may have a placement; those that it needs not first."""
    known, per_rank = options_of(name), placement.num_stages // placement.num_ranks
    yield {}
    if "chunks" in known:
        yield {"chunks": per_rank}
    if "waves" in known:
        yield {"waves": max(per_rank // 2, 1)}


def make_schedule(name: str, *, ranks: int, microbatches: int, **options: object) -> Schedule:
    """Makes a schedule by its name.

    Args:
        name: a name in `SCHEDULES`, in upper or lower case.
        ranks: number of pipeline ranks. Schedules in two directions need an even number.
        microbatches: number of microbatches per step; any number is allowed.
        **options: options of the schedule, such as `chunks=2` for "interleaved-1f1b"; see `options_of`.

    Raises UsageError for an unknown name (the message suggests the nearest one), an unknown option, numbers below 1,
    and whatever else the schedule cannot do.

    >>> print(make_schedule("1f1b", ranks=2, microbatches=3))
    rank 0: 0F0 0F1 0B0 0F2 0B1 0B2
    rank 1: 1F0 1B0 1F1 1B1 1F2 1B2
    """
    name = name if name in SCHEDULES else name.lower()
    if name not in SCHEDULES:
        raise unknown("schedule", name, SCHEDULES)
    require_positive(ranks=ranks, microbatches=microbatches)
    known = options_of(name)
    if others := sorted(set(options) - set(known)):
        takes = f"its options are {', '.join(known)}" if known else "it has no options"
        raise UsageError(f"schedule {name!r} does not take {', '.join(others)}; {takes}")
    return SCHEDULES[name](ranks, microbatches, **options)
