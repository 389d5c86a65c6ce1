"""Memory: a schedule with the recomputations, unshards and offloads that options ask for. Must not contain: where in a
row they go.
"""

from __future__ import annotations

from collections.abc import Iterable

from pipeflow.core.cost import CostModel
from pipeflow.core.errors import UsageError
from pipeflow.core.schedule import Schedule


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
        from pipeflow.orders.memory.recomputation import with_recompute  # simulates: the command lists without it

        schedule = with_recompute(schedule, _stages("recompute", recompute))
    if unshard is not False:
        from pipeflow.orders.memory.unsharding import with_unshard

        schedule = with_unshard(schedule, _stages("unshard", unshard))
    if offload is False:
        return schedule
    if cost is None:
        raise UsageError(
            "an offload is planned by the time of its copies: give cost=CostModel(...) with offload=, the time of a "
            "copy per stage"
        )
    from pipeflow.orders.memory.offloading import with_offload

    return with_offload(schedule, cost, _stages("offload", offload))


def _stages(option: str, given: object) -> tuple[int, ...] | None:
    """The stages; None for all of them."""
    if given is True:
        return None
    stages = tuple(given) if isinstance(given, Iterable) and not isinstance(given, str) else (given,)
    if isinstance(given, Iterable) and all(isinstance(stage, int) for stage in stages):
        return stages
    raise UsageError(f"{option} is True, for all stages, or a list of stages such as [0, 1], got {given!r}")
