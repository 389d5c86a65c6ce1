"""Published values and op strings (the zero-bubble and Megatron-LM papers and their code), at unit costs."""

from __future__ import annotations

import pytest

from pipeflow.analysis.simulate import simulate
from pipeflow.core.cost import CostModel
from pipeflow.schedules import make_schedule


@pytest.mark.parametrize(
    ("name", "chunks", "microbatches", "makespan", "peaks"),
    [
        ("gpipe", None, 8, 33, [8, 8, 8, 8]),
        ("gpipe", None, 12, 45, [12, 12, 12, 12]),
        ("1f1b", None, 8, 33, [4, 3, 2, 1]),
        ("1f1b", None, 12, 45, [4, 3, 2, 1]),
        ("interleaved-1f1b", 2, 8, 57, [11, 9, 7, 5]),
        ("interleaved-1f1b", 2, 12, 81, [11, 9, 7, 5]),
        ("interleaved-1f1b", 4, 8, 105, [19, 17, 15, 13]),
        ("interleaved-1f1b", 4, 12, 153, [19, 17, 15, 13]),
    ],
)
def test_four_ranks(name: str, chunks: int | None, microbatches: int, makespan: int, peaks: list[int]) -> None:
    options = {} if chunks is None else {"chunks": chunks}
    schedule = make_schedule(name, ranks=4, microbatches=microbatches, **options)
    passes = chunks or 1  # a pass through one chunk takes 1
    timeline = simulate(schedule, CostModel.even(schedule.placement, passes, passes, passes))
    assert timeline.makespan == timeline.span == makespan
    assert timeline.work == 3 * microbatches * passes
    assert [peak * passes for peak in timeline.peak_activations] == peaks


def test_1f1b_of_4_ranks_and_4_microbatches() -> None:
    row = make_schedule("1f1b", ranks=4, microbatches=4).rows[1]
    assert " ".join(map(str, row)) == "1F0 1F1 1F2 1B0 1F3 1B1 1B2 1B3"


def test_interleaved_of_2_ranks_and_4_microbatches() -> None:
    rows = make_schedule("interleaved-1f1b", ranks=2, microbatches=4, chunks=2).rows
    assert [" ".join(map(str, row)) for row in rows] == [
        "0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3",
        "1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3",
    ]
