from __future__ import annotations

import math
from itertools import pairwise

import pytest

from pipeflow.core.analysis.measures import utilisations, window
from pipeflow.core.analysis.simulation import simulate
from pipeflow.core.cost import CostModel
from pipeflow.core.errors import UsageError
from pipeflow.core.timeline import Timeline
from pipeflow.schedules import SCHEDULES, make_schedule
from tests.draw.samples import SAMPLES


@pytest.fixture(params=SCHEDULES)
def timeline(request: pytest.FixtureRequest) -> Timeline:
    schedule = make_schedule(request.param, ranks=4, microbatches=6).with_reductions()
    return simulate(schedule, CostModel.even(schedule.placement, 1, 0.75, 0.5, transfer=0.25, reduce=1.5))


def test_the_whole_step_has_the_measures_of_the_timeline(timeline: Timeline) -> None:
    ranks = window(timeline)
    assert max(rank.computing for rank in ranks) == pytest.approx(timeline.work)
    assert tuple(rank.peak for rank in ranks) == timeline.peak_activations
    assert [rank.utilisation for rank in ranks] == pytest.approx(utilisations(timeline))
    assert min(1 - rank.utilisation for rank in ranks) == pytest.approx(timeline.makespan_bubble_ratio)


def test_parts_add_up_to_the_whole(timeline: Timeline) -> None:
    cuts = [0.0, 1.1, 3.0, 7.9, 8.0, timeline.makespan]
    parts = [window(timeline, first, last) for first, last in pairwise(cuts)]
    for rank, whole in enumerate(window(timeline)):
        mine = [part[rank] for part in parts]
        assert math.fsum(each.idle for each in mine) == pytest.approx(whole.idle)
        assert max(each.peak for each in mine) == whole.peak
        for kind, time in whole.busy.items():
            assert math.fsum(each.busy.get(kind, 0.0) for each in mine) == pytest.approx(time)
        for (first, last), each in zip(pairwise(cuts), mine, strict=True):
            assert each.idle + each.computing == pytest.approx(last - first)


def test_a_part_has_what_was_kept_before_it_and_not_what_is_kept_after() -> None:
    timeline = SAMPLES["1f1b"]
    curve = timeline.memory(0)
    for (first, amount), (last, _) in pairwise(curve):
        assert window(timeline, first, last)[0].peak == amount
        assert window(timeline, (first + last) / 2, last)[0].peak == amount


def test_time_after_the_step_is_none() -> None:
    timeline = SAMPLES["1f1b"]
    assert window(timeline, 30, 1e9) == window(timeline, 30, timeline.makespan)
    beyond = window(timeline, 50, 60)
    assert {(rank.idle, rank.utilisation, rank.computing) for rank in beyond} == {(0.0, 0.0, 0.0)}


@pytest.mark.parametrize("name", SAMPLES)
def test_shares_are_shares(name: str) -> None:
    for rank in window(SAMPLES[name]):
        assert 0 <= rank.utilisation <= 1
        assert rank.idle >= 0


def test_a_part_does_not_end_before_it_begins() -> None:
    with pytest.raises(UsageError, match="must end after it begins, got 3 to 2"):
        window(SAMPLES["1f1b"], 3, 2)
