"""Partition: which layers of a model go to which stage."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from numbers import Real
from typing import Literal

from pipeflow.core.errors import UsageError
from pipeflow.core.placement import require_positive

Part = tuple[int, int]
Parts = list[list[Part]]
Cut = Literal["uniform"] | Sequence[float] | Sequence[Part]
"""How layers are cut into stages: into runs of equal length, by one weight a layer, or into given parts."""


def partition_uniform(num_layers: int, pipeline_size: int, num_chunks: int = 1) -> Parts:
    """Per rank, its parts `(start, end)` of the layers, end excluded, one part per chunk. All layers have the same
    weight.

    The layers are cut into `num_chunks` equal pieces, and each piece is divided among the ranks. If they do not divide
    evenly, the last ranks get one layer more. Part c of rank r is stage c * pipeline_size + r.

    >>> partition_uniform(10, 4)
    [[(0, 2)], [(2, 4)], [(4, 7)], [(7, 10)]]
    >>> partition_uniform(8, 2, 2)
    [[(0, 2), (4, 6)], [(2, 4), (6, 8)]]

    Raises UsageError when there are fewer layers than stages or the layers do not divide into the chunks.
    """
    _require_enough(num_layers, pipeline_size, num_chunks)
    if num_layers % num_chunks:
        raise UsageError(f"{num_layers} layers do not divide into {num_chunks} chunks; use partition_balanced")
    per_chunk = num_layers // num_chunks
    base, extra = divmod(per_chunk, pipeline_size)
    sizes = [base] * (pipeline_size - extra) + [base + 1] * extra
    return _deal(sizes * num_chunks, pipeline_size)


def partition_balanced(weights: Sequence[float], pipeline_size: int, num_chunks: int = 1) -> Parts:
    """Like `partition_uniform`, but makes the heaviest stage as light as possible. `weights` are the layers' costs in
    any unit, such as times or parameter counts.

    Every stage gets at least one layer, and among equally good cuts the most even one is taken. Dynamic programming
    over the prefix sums takes len(weights)^2 * stages steps.

    >>> partition_balanced([5, 1, 1, 1, 1, 5], 2)
    [[(0, 3)], [(3, 6)]]

    Raises UsageError when there are fewer layers than stages or a weight is negative.
    """
    if isinstance(weights, str) or not isinstance(weights, Sequence):
        raise UsageError(f"weights must be a list with one number per layer, got {weights!r}")
    _require_enough(len(weights), pipeline_size, num_chunks)
    if any(not isinstance(weight, Real) or not weight >= 0 for weight in weights):
        raise UsageError("the weights of layers must be numbers and must not be negative")
    layers, stages = len(weights), pipeline_size * num_chunks
    before = [0.0, *accumulate(weights)]
    best = [(weight, weight**2) for weight in before]  # per n: the best cut of the first n layers so far
    cuts: list[list[int]] = []
    for stage in range(1, stages):
        choices = [_best_cut(best, before, stage, end) for end in range(layers + 1)]
        best = [score for score, _ in choices]
        cuts.append([start for _, start in choices])
    sizes, end = [], layers
    for cut in reversed(cuts):
        sizes.append(end - cut[end])
        end = cut[end]
    return _deal([end, *reversed(sizes)], pipeline_size)


def stage_parts(num_layers: int, num_stages: int, cut: Cut = "uniform") -> list[Part]:
    """The part `(start, end)` of each stage, in the order of the stages, end excluded.

    Args:
        num_layers: in the whole model.
        num_stages: as many as the placement has.
        cut: where to cut. "uniform" gives all layers the same weight, as `partition_uniform` does. A list with one
            weight per layer makes the heaviest stage as light as possible, as `partition_balanced` does. A list of
            pairs `(start, end)`, one per stage, is checked and used as it is.

    >>> stage_parts(6, 3)
    [(0, 2), (2, 4), (4, 6)]
    >>> stage_parts(6, 3, [5, 1, 1, 1, 1, 5])
    [(0, 1), (1, 5), (5, 6)]
    >>> stage_parts(6, 3, [(0, 1), (1, 2), (2, 6)])
    [(0, 1), (1, 2), (2, 6)]

    Raises UsageError as those functions do, for another number of weights than layers, and for parts that leave out a
    layer, have one twice, or are empty.
    """
    given: object = cut
    if isinstance(cut, str) and cut == "uniform":
        return [part for [part] in partition_uniform(num_layers, num_stages)]
    if isinstance(cut, str) or not isinstance(given, Sequence):
        raise UsageError(f"a cut is 'uniform' or a list, got {cut!r}")
    parts = [(each[0], each[1]) for each in cut if isinstance(each, Sequence) and len(each) == 2]
    if parts:
        _require_cover(parts, list(cut), num_layers, num_stages)
        return parts
    weights = [each for each in cut if not isinstance(each, Sequence)]
    if len(weights) != num_layers or len(weights) != len(cut):
        raise UsageError(f"a cut by weight needs one number for each of the {num_layers} layers, got {list(cut)}")
    return [part for [part] in partition_balanced(weights, num_stages)]


def _require_cover(parts: list[Part], given: list[object], num_layers: int, num_stages: int) -> None:
    starts_after = [(0, 0), *parts, (num_layers, num_layers)]
    follows = all(before[1] == after[0] for before, after in pairwise(starts_after))
    if len(parts) != len(given) or len(parts) != num_stages or not follows or any(start >= end for start, end in parts):
        raise UsageError(
            f"{num_stages} stages of {num_layers} layers need {num_stages} pairs (start, end), each starting where the "
            f"one before ends, from 0 to {num_layers}, none of them empty; got {given}"
        )


Score = tuple[float, float]  # the heaviest stage, then the sum of squares, which prefers even ones


def _best_cut(best: list[Score], before: list[float], stage: int, end: int) -> tuple[Score, int]:
    """Where stage number `stage` of the first `end` layers starts, and the score with it."""

    def score(start: int) -> Score:
        weight = before[end] - before[start]
        return max(best[start][0], weight), best[start][1] + weight**2

    return min(((score(start), start) for start in range(stage, end)), default=((float("inf"), 0.0), 0))


def _require_enough(num_layers: int, pipeline_size: int, num_chunks: int) -> None:
    require_positive(num_layers=num_layers, pipeline_size=pipeline_size, num_chunks=num_chunks)
    if num_layers < pipeline_size * num_chunks:
        raise UsageError(
            f"{num_layers} layers cannot fill {pipeline_size * num_chunks} stages ({pipeline_size} ranks x "
            f"{num_chunks} chunks): use fewer ranks or chunks, or more layers"
        )


def _deal(sizes: list[int], pipeline_size: int) -> Parts:
    """Consecutive parts of the given sizes, stage s going to rank s modulo `pipeline_size`."""
    ends = list(accumulate(sizes))
    parts = [(end - size, end) for size, end in zip(sizes, ends, strict=True)]
    return [parts[rank::pipeline_size] for rank in range(pipeline_size)]
