"""Routes: which stages pass tensors to stages behind the next one, and how a tensor gets to all stages that need it.
Must not contain: what the tensors are, and when they are sent.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple

from pipeflow.core.errors import UsageError
from pipeflow.core.placement import Placement


class Route(NamedTuple):
    """A pair of stages that are not neighbours. The first stage passes tensors to the second for each microbatch.
    Gradients pass back from the second to the first. Each stage passes tensors to the next one without a route.

    Attributes:
        source: the stage that sends.
        target: the stage that receives, behind the stage after `source`.
    """

    source: int
    target: int


Routes = tuple[Route, ...]
"""Routes in ascending order, without duplicates."""


def routes_among(stages: int, routes: Iterable[tuple[int, int]]) -> Routes:
    """Pairs of (from stage, to stage) as the routes of a pipeline with `stages` stages.

    Raises UsageError for a pair that is not a route: it leads to the same stage, to the next one or back, or names a
    stage that does not exist.
    """
    found = sorted({Route(*route) for route in routes})
    for source, target in found:
        if not 0 <= source < target - 1 < stages - 1:
            raise UsageError(
                f"a route must skip at least one stage, among stages 0 to {stages - 1}, got {(source, target)}: leave "
                "it out if it leads to the next stage"
            )
    return tuple(found)


def sources_of(stage: int, routes: Routes) -> list[int]:
    """The stages that `stage` receives its inputs from, in the order of the inputs: the stage before it, then those of
    routes.
    """
    before = [stage - 1] if stage > 0 else []
    return before + [route.source for route in routes if route.target == stage]


def targets_of(stage: int, stages: int, routes: Routes) -> list[int]:
    """The stages that receive the outputs of `stage`, in the order of the outputs: the next stage, then those of
    routes.
    """
    after = [stage + 1] if stage + 1 < stages else []
    return after + [route.target for route in routes if route.source == stage]


def way(
    maker: int, users: Collection[int], placement: Placement, routes: Collection[tuple[int, int]] | None = None
) -> dict[int, int]:
    """The way of a tensor that stage `maker` makes to the later stages `users`, which need it: per stage that receives
    it, the stage it comes from.

    A stage takes the tensor from the latest stage on its own rank that has it; if there is none, from the nearest stage
    that has it. So each rank that needs the tensor receives it once, no other rank receives it, and there is no way
    with fewer transfers. Two stages count as being on one rank if they are so on all paths of the placement.

    With `routes`, the tensor passes only on these and from each stage to the next, so stages between may have to pass
    it on.
    """
    found: dict[int, int] = {}
    for user in sorted(users):
        _pull(user, maker, found, placement, routes)
    return found


def _pull(
    stage: int, maker: int, found: dict[int, int], placement: Placement, routes: Collection[tuple[int, int]] | None
) -> None:
    if stage in found:
        return
    having = [each for each in (maker, *found) if each < stage]
    usable = [each for each in having if routes is None or each == stage - 1 or (each, stage) in routes]
    if not usable:
        _pull(stage - 1, maker, found, placement, routes)
        usable = [stage - 1]
    near = [each for each in usable if all(path[each] == path[stage] for path in placement.paths)]
    found[stage] = max(near or usable)
