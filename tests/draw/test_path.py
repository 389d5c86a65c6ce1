from __future__ import annotations

import re

import pytest

from pipeflow.core.analysis.measures import path_times
from pipeflow.core.analysis.simulation import simulate
from pipeflow.core.cost import CostModel
from pipeflow.core.timeline import Timeline
from pipeflow.draw import CriticalPath
from pipeflow.draw.path import folded, stretches
from pipeflow.schedules import SCHEDULES, make_schedule
from tests.draw.test_gantt import draw


def planned(name: str, microbatches: int = 8, transfer: float = 0.5, reduce: float | None = None) -> Timeline:
    schedule = make_schedule(name, ranks=4, microbatches=microbatches)
    schedule = schedule if reduce is None else schedule.with_reductions()
    return simulate(schedule, CostModel.even(schedule.placement, transfer=transfer, reduce=reduce or 0))


def test_a_stretch_on_one_rank_is_one_line() -> None:
    assert draw(CriticalPath(planned("1f1b", transfer=0))) == """\
critical path of 1f1b, 4 ranks, 8 microbatches
at  after                   rank  runs
 0                             0  0F0
 1  activation from rank 0     1  1F0
 2  activation from rank 1     2  2F0
 3  activation from rank 2     3  3F0 3B0 ... 3B7 (16 actions)
27  gradient from rank 3       2  2B7
29  gradient from rank 2       1  1B7
31  gradient from rank 1       0  0B7
computing 33, waiting 0
"""  # fmt: skip


def test_what_repeats_is_said_once() -> None:
    short, long = (draw(CriticalPath(planned("1f1b", microbatches))).splitlines() for microbatches in (24, 100))
    assert len(long) == len(short) < 30
    assert re.search(r"\.\.\. the same 23 times more, to 0F96$", "\n".join(long), re.MULTILINE)


@pytest.mark.parametrize("name", SCHEDULES)
def test_folding_loses_nothing_of_the_path(name: str) -> None:
    timeline = planned(name, 12, reduce=3)
    path = stretches(timeline)
    folds = list(folded(path))
    assert sum(len(fold.stretches) * (1 + fold.times) for fold in folds) == len(path)
    assert folds[-1].last == path[-1].actions[-1]
    by_rank, beside, waiting = path_times(timeline)
    assert sum(by_rank) + sum(beside.values()) + waiting == pytest.approx(timeline.makespan)


def test_reductions_end_the_path() -> None:
    lines = draw(CriticalPath(planned("zb-h1", transfer=0, reduce=3))).splitlines()
    assert lines[-2].endswith("0R7 (21 actions)")
    assert lines[-1] == "computing 27, reductions 3, waiting 0"


def test_times_are_in_the_unit_of_the_caller() -> None:
    drawing = draw(CriticalPath(planned("1f1b"), unit="ms", factor=1000))
    assert drawing.splitlines()[1].startswith("at ms  waited  after")
    assert "\n 1500     500  activation from rank 0     1  1F0\n" in drawing
    assert drawing.endswith("computing 33000 ms, waiting 8000 ms\n")


def test_a_timeline_without_spans_has_an_empty_path() -> None:
    empty = planned("1f1b")
    drawing = draw(CriticalPath(Timeline("empty", empty.placement, ((), (), (), ()))))
    assert drawing.splitlines()[-1] == "computing 0, waiting 0"
