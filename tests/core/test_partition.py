from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise

import pytest

from pipeflow.core.errors import UsageError
from pipeflow.core.partition import partition_balanced, partition_uniform, stage_parts


@pytest.mark.parametrize(
    ("layers", "ranks", "chunks", "parts"),
    [
        (12, 4, 1, [[(0, 3)], [(3, 6)], [(6, 9)], [(9, 12)]]),
        (10, 4, 1, [[(0, 2)], [(2, 4)], [(4, 7)], [(7, 10)]]),
        (48, 2, 1, [[(0, 24)], [(24, 48)]]),
        (8, 2, 2, [[(0, 2), (4, 6)], [(2, 4), (6, 8)]]),
        (12, 2, 3, [[(0, 2), (4, 6), (8, 10)], [(2, 4), (6, 8), (10, 12)]]),
        (12, 4, 2, [[(0, 1), (6, 7)], [(1, 2), (7, 8)], [(2, 4), (8, 10)], [(4, 6), (10, 12)]]),
        (1, 1, 1, [[(0, 1)]]),
    ],
)
def test_uniform_parts(layers: int, ranks: int, chunks: int, parts: list[list[tuple[int, int]]]) -> None:
    assert partition_uniform(layers, ranks, chunks) == parts


@pytest.mark.parametrize(
    ("layers", "ranks", "chunks", "message"),
    [
        (9, 2, 2, "9 layers do not divide into 2 chunks; use partition_balanced"),
        (3, 4, 1, "3 layers cannot fill 4 stages"),
        (7, 4, 2, r"7 layers cannot fill 8 stages \(4 ranks x 2 chunks\): use fewer ranks or chunks"),
        (0, 1, 1, "num_layers must be an integer of at least 1"),
        (4, 0, 1, "pipeline_size must be an integer of at least 1"),
        (4, 2, -1, "num_chunks must be an integer of at least 1"),
    ],
)
def test_what_cannot_be_split_evenly_is_refused(layers: int, ranks: int, chunks: int, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        partition_uniform(layers, ranks, chunks)


def stages(parts: list[list[tuple[int, int]]]) -> list[tuple[int, int]]:
    """In the order of the stages, chunk by chunk."""
    return [parts[rank][chunk] for chunk in range(len(parts[0])) for rank in range(len(parts))]


def heaviest(weights: Sequence[float], cuts: Sequence[tuple[int, int]]) -> float:
    return max(sum(weights[start:end]) for start, end in cuts)


def every_cut(layers: int, count: int) -> Iterator[list[tuple[int, int]]]:
    for ends in combinations(range(1, layers), count - 1):
        yield list(pairwise((0, *ends, layers)))


def test_balanced_is_as_light_as_any_cut() -> None:
    draw = random.Random(0)
    for _ in range(150):
        ranks, chunks = draw.choice([(1, 1), (2, 1), (3, 1), (4, 1), (2, 2)])
        weights = [draw.choice([0, 1, 1, 2, 3, 5, 9]) for _ in range(draw.randint(ranks * chunks, 9))]
        cuts = stages(partition_balanced(weights, ranks, chunks))
        assert [start for start, _ in cuts] == [0, *(end for _, end in cuts[:-1])]
        assert cuts[-1][1] == len(weights)
        assert all(start < end for start, end in cuts)
        lightest = min(heaviest(weights, other) for other in every_cut(len(weights), ranks * chunks))
        assert heaviest(weights, cuts) == lightest


@pytest.mark.parametrize(
    ("weights", "ranks", "cuts"),
    [
        ([5, 1, 1, 1, 1, 5], 2, [(0, 3), (3, 6)]),
        ([10, 1, 1, 1, 1, 1, 1, 10], 4, [(0, 1), (1, 4), (4, 7), (7, 8)]),
        ([3, 1, 4, 1, 5, 9, 2, 6], 3, [(0, 4), (4, 6), (6, 8)]),
    ],
)
def test_balanced_parts(weights: list[float], ranks: int, cuts: list[tuple[int, int]]) -> None:
    assert stages(partition_balanced(weights, ranks)) == cuts


def test_equal_weights_are_split_as_evenly_as_can_be() -> None:
    sizes = [end - start for start, end in stages(partition_balanced([1] * 10, 2, 2))]
    assert sorted(sizes) == [2, 2, 3, 3]


def test_balanced_refuses_too_few_layers_and_negative_weights() -> None:
    with pytest.raises(UsageError, match="3 layers cannot fill 4 stages"):
        partition_balanced([1, 2, 3], 2, 2)
    for wrong in (-1.0, float("nan")):
        with pytest.raises(UsageError, match="must not be negative"):
            partition_balanced([1, wrong], 2)


def test_a_cut_of_another_name_is_refused() -> None:
    assert stage_parts(4, 2) == stage_parts(4, 2, [1, 1, 1, 1])
    for cut in ("balanced", 4):
        with pytest.raises(UsageError, match=f"a cut is 'uniform' or a list, got {cut!r}"):
            stage_parts(4, 2, cut)  # type: ignore[arg-type]
