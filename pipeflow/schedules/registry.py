"""The registry: the names of the families of schedules, and the function that makes a schedule by name. Must not
contain: the orders themselves.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import cache
from types import MappingProxyType

from pipeflow.core.errors import UsageError, unknown
from pipeflow.core.placement import require_positive
from pipeflow.core.schedule import Schedule
from pipeflow.schedules.controllable import v_half, v_min
from pipeflow.schedules.dualpipe import dualpipe, dualpipe_v
from pipeflow.schedules.gis import gis, gis_h
from pipeflow.schedules.gpipe import gpipe
from pipeflow.schedules.interleaved import interleaved_one_f_one_b
from pipeflow.schedules.interleaved_zb import interleaved_zb
from pipeflow.schedules.looped_bfs import looped_bfs
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
    }
)
"""The functions that make schedules, by the schedules' names."""


def options_of(name: str) -> tuple[str, ...]:
    """The names of the options of the schedule `name`, besides ranks and microbatches. Raises KeyError for an unknown
    name.
    """
    return _keywords(SCHEDULES[name])


@cache
def _keywords(function: Callable[..., Schedule]) -> tuple[str, ...]:
    parameters = inspect.signature(function).parameters.values()
    return tuple(parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY)


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
