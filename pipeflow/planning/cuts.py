"""Cuts: layers of a transformer dealt to the stages of a placement so that its busiest rank has little to do. Must not
contain: what layers cost.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate

from pipeflow.core.errors import UsageError
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


def cut_with_ends(layers: int, placement: Placement, first: int | None, last: int | None) -> tuple[Part, ...]:
    """Per stage its layers [start, end), where the first and the last pipeline rank have so many layers, spread evenly
    over their stages, and the other ranks share the rest evenly. These are Megatron-LM's
    --decoder-first-pipeline-num-layers and --decoder-last-pipeline-num-layers. None: as many as the other ranks.

    >>> cut_with_ends(14, Placement.linear(4), 3, 1)
    ((0, 3), (3, 8), (8, 13), (13, 14))

    Raises UsageError unless the placement has stage i on rank i modulo its ranks, and for layers that do not divide.
    """
    ranks, stages = placement.num_ranks, placement.num_stages
    chunks = max(1, stages // ranks)
    if placement != Placement.looped(ranks, chunks):
        raise UsageError(
            "layers of the first and the last rank need a schedule with stage i on rank i modulo its ranks"
        )
    given = {rank: size for rank, size in ((0, first), (ranks - 1, last)) if size is not None}
    if ranks == 1 and first is not None and last is not None and first != last:
        raise UsageError(f"one pipeline rank is the first and the last: it cannot have {first} and {last} layers")
    others, rest = ranks - len(given), layers - sum(given.values())
    for name, size in (("first", first), ("last", last)):
        if size is not None and size % chunks:
            raise UsageError(f"{size} layers of the {name} rank do not divide over its {chunks} stages: use a multiple")
    if rest < 0 or (rest and not others) or (others and rest % (others * chunks)):
        raise UsageError(
            f"{layers} layers leave {rest} for {others} other ranks of {chunks} stages each, which do not divide: give "
            f"other numbers, such that the rest is a multiple of {max(1, others * chunks)}"
        )
    sizes = [given.get(stage % ranks, rest // others if others else 0) // chunks for stage in range(stages)]
    ends = list(accumulate(sizes))
    return tuple(zip([0, *ends], ends, strict=False))
