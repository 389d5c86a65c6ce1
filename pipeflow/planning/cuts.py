"""Cuts: layers of a transformer dealt to the stages of a placement so that its busiest rank has little to do. Must not
contain: what layers cost.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate

from pipeflow.core.partition import Part, stage_parts
from pipeflow.core.placement import Placement


@lru_cache(maxsize=4096)
def cut_by_load(layers: int, placement: Placement, first: float, last: float) -> tuple[Part, ...]:
    """Per stage its layers [start, end). All layers cost 1. The part before them costs `first`, and the part after them
    costs `last`.

    Each stage gets a layer. Each other layer goes to the stage whose rank has the least work with it. Ties go to the
    lightest stage, then to the last one. With one stage per rank, no other cut has a lighter busiest rank.

    >>> cut_by_load(32, Placement.linear(8), 0.0, 2.4)
    ((0, 4), (4, 8), (8, 12), (12, 16), (16, 20), (20, 25), (25, 30), (30, 32))
    """
    stages = placement.num_stages
    share = 1 / len(placement.paths)  # of the microbatches, that a path has
    loads = [1.0] * stages
    loads[0] += first
    loads[-1] += last
    holders = [[path[stage] for path in placement.paths] for stage in range(stages)]
    ranks = [0.0] * placement.num_ranks
    for stage, load in enumerate(loads):
        for rank in holders[stage]:
            ranks[rank] += load * share
    sizes = [1] * stages
    for _ in range(layers - stages):
        stage = min(range(stages), key=lambda each: (max(ranks[rank] for rank in holders[each]), loads[each], -each))
        sizes[stage] += 1
        loads[stage] += 1
        for rank in holders[stage]:
            ranks[rank] += share
    ends = list(accumulate(sizes))
    return tuple(zip([0, *ends], ends, strict=False))


@lru_cache(maxsize=4096)
def even_cut(layers: int, stages: int) -> tuple[Part, ...]:
    """Per stage its layers [start, end), with numbers of layers that are as equal as possible."""
    return tuple(stage_parts(layers, stages))
