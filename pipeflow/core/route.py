"""Routes: which stages hand tensors to later ones than the next, and on which way a tensor gets to all stages that need
it. What must not live here: what the tensors are, and when they pass.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple

from pipeflow.core.errors import UsageError
from pipeflow.core.placement import Placement


class Route(NamedTuple):
    """What stage `source` hands to stage `target` for each microbatch, beside what each stage hands to the next. The
    gradients of it go back from `target` to `source`.
    """

    source: int
    target: int


Routes = tuple[Route, ...]
"""In order, each once."""


def routes_among(stages: int, routes: Iterable[tuple[int, int]]) -> Routes:
    """These pairs of (from stage, to stage) as the routes of a pipeline of so many `stages`.

    Raises UsageError for a pair that is no route: from a stage to itself, to the next or to an earlier one, or of a
    stage that does not exist.
    """
    found = sorted({Route(*route) for route in routes})
    for source, target in found:
        if not 0 <= source < target - 1 < stages - 1:
            raise UsageError(
                f"a route goes from a stage to one behind the next, among stages 0 to {stages - 1}, got "
                f"{(source, target)}: what goes to the next stage needs no route"
            )
    return tuple(found)


def sources_of(stage: int, routes: Routes) -> list[int]:
    """The stages from which `stage` gets its inputs, in the order of these: the one before it, then those of routes."""
    before = [stage - 1] if stage > 0 else []
    return before + [route.source for route in routes if route.target == stage]


def targets_of(stage: int, stages: int, routes: Routes) -> list[int]:
    """The stages that get the outputs of `stage`, in the order of these: the next one, then those of routes."""
    after = [stage + 1] if stage + 1 < stages else []
    return after + [route.target for route in routes if route.source == stage]


def way(
    maker: int, users: Collection[int], placement: Placement, routes: Collection[tuple[int, int]] | None = None
) -> dict[int, int]:
    """Of a tensor that stage `maker` makes: per stage that gets it, from which one. `users` are the later stages that
    need it.

    A stage takes it from the latest stage of its own rank that has it, where there is one, else from the nearest stage
    that has it. So each rank that needs the tensor receives it once, no other one receives it, and it takes no fewer
    transfers. A stage counts as of the same rank where it is so on all paths of the placement.

    With `routes`, it passes on these and from each stage to the next alone; stages between may have to hand it on then.
    """
    found: dict[int, int] = {}
    for user in sorted(users):
        _pull(user, maker, found, placement, routes)
    return found


def _pull(
    stage: int,
    maker: int,
    found: dict[int, int],
    placement: Placement,
    routes: Collection[tuple[int, int]] | None,
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
