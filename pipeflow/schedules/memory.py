"""Memory: a schedule with the recomputations, unshards and offloads that options ask for. Must not contain: where in a
row they go.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from pipeflow.core.cost import CostModel
from pipeflow.core.errors import UsageError
from pipeflow.core.schedule import Schedule

STAGE_OPTIONS = {
    "recompute_stages": "compute again what forwards save, on these stages: all, or such as 0,2-3",
    "unshard_stages": "gather weights under fully_shard ahead, on these stages: all, or such as 0,2-3",
    "offload_stages": "move what forwards save to the host and back, on these stages: all, or such as 0,2-3",
}
"""The options of users for `recompute`, `unshard` and `offload`, and what they mean."""


def with_memory_kinds(
    schedule: Schedule,
    *,
    recompute: object = False,
    unshard: object = False,
    offload: object = False,
    cost: CostModel | None = None,
) -> Schedule:
    """`schedule` as `with_recompute`, then `with_unshard` and then `with_offload` make it for these stages: True for
    all, False for none. `cost` is for offloads.

    Raises UsageError as they do, for an offload without costs, and for stages that are neither a bool nor numbers.
    """
    if recompute is not False:
        from pipeflow.schedules.orders.memory.recomputation import (
            with_recompute,  # simulates: the command lists without it
        )

        schedule = with_recompute(schedule, _stages("recompute", recompute))
    if unshard is not False:
        from pipeflow.schedules.orders.memory.unsharding import with_unshard

        schedule = with_unshard(schedule, _stages("unshard", unshard))
    if offload is False:
        return schedule
    if cost is None:
        raise UsageError(
            "an offload is planned by the time of its copies: give cost=CostModel(...) with offload=, the time of a "
            "copy per stage"
        )
    from pipeflow.schedules.orders.memory.offloading import with_offload

    return with_offload(schedule, cost, _stages("offload", offload))


def stages_in(text: str) -> bool | tuple[int, ...]:
    """The stages that a text names: True for "all", or numbers and ranges with commas between. Raises UsageError for
    other texts.

    >>> stages_in("0,2-3")
    (0, 2, 3)
    """
    if text == "all":
        return True
    if not _STAGES.fullmatch(text):
        raise UsageError(f"it must be all, or stages such as 0,2-3, got {text[:40]!r}")
    ends = [(int(first), int(last or first)) for first, _, last in (part.partition("-") for part in text.split(","))]
    if wrong := [(first, last) for first, last in ends if first > last]:
        first, last = wrong[0]
        raise UsageError(f"the stages {first}-{last} go down: write {last}-{first}, got {text[:40]!r}")
    return tuple(stage for first, last in ends for stage in range(first, last + 1))


_STAGES = re.compile(r"\d{1,4}(-\d{1,4})?(,\d{1,4}(-\d{1,4})?)*", re.ASCII)


def _stages(option: str, given: object) -> tuple[int, ...] | None:
    """The stages; None for all of them."""
    if given is True:
        return None
    stages = tuple(given) if isinstance(given, Iterable) and not isinstance(given, str) else (given,)
    if isinstance(given, Iterable) and all(isinstance(stage, int) for stage in stages):
        return stages
    raise UsageError(f"{option} is True, for all stages, or a list of stages such as [0, 1], got {given!r}")
