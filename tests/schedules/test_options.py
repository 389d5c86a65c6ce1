"""Options: what a larger group, or an extra forward before the first backward, costs and gains."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeflow.core.analysis.simulation import simulate
from pipeflow.core.cost import CostModel
from pipeflow.core.schedule import Schedule
from pipeflow.schedules import make_schedule

Costs = tuple[int, int, int]
"""Of one microbatch on one rank's whole share of the model: forward, and both halves of a backward."""

times = st.integers(1, 5)
all_costs = st.tuples(times, times, times)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("microbatches", [16, 24])
def test_an_eager_warm_up_pays_for_transfers_once(ranks: int, microbatches: int) -> None:
    """1F1B with no extra warm-up pays at every microbatch; with as much as there can be it is eager-1f1b."""
    cost = 0.25
    excess = []
    for extra in range(ranks + 1):
        schedule = make_schedule("1f1b", ranks=ranks, microbatches=microbatches, extra_warmup=extra)
        free, slow = (simulate(schedule, CostModel.even(schedule.placement, transfer=c)) for c in (0, cost))
        excess.append(slow.makespan - free.makespan)
        following = range(ranks - 1, -1, -1)
        assert free.peak_activations == tuple(min(1 + more + min(extra, more), microbatches) for more in following)
    assert excess == sorted(excess, reverse=True)
    assert excess[-1] == pytest.approx(2 * (ranks - 1) * cost)
    assert schedule.rows == make_schedule("eager-1f1b", ranks=ranks, microbatches=microbatches).rows


grouped = {
    "ranks": st.integers(1, 8),
    "groups": st.integers(1, 3),
    "chunks": st.integers(1, 4),
    "costs": all_costs,
}


@settings(max_examples=40)
@given(**grouped, larger=st.integers(0, 8), extra=st.integers(0, 8))
@pytest.mark.slow
def test_groups_and_warm_ups_of_interleaved_1f1b(
    require_sound: Callable[[Schedule], None],
    ranks: int,
    groups: int,
    chunks: int,
    costs: Costs,
    larger: int,
    extra: int,
) -> None:
    group = ranks + larger
    options = {"chunks": chunks, "group": group, "extra_warmup": extra}
    require_sound(make_schedule("interleaved-1f1b", ranks=ranks, microbatches=groups * group - larger, **options))
    schedule = make_schedule("interleaved-1f1b", ranks=ranks, microbatches=groups * group, **options)
    timeline = simulate(schedule, CostModel.even(schedule.placement, *costs))
    assert timeline.makespan - timeline.work == pytest.approx((ranks - 1) * sum(costs) / chunks)
    most = groups * group * chunks
    peaks = [min(2 * (ranks - rank - 1) + (chunks - 1) * group + 1 + extra, most) for rank in range(ranks)]
    assert [peak * chunks for peak in timeline.peak_activations] == pytest.approx(peaks)


@settings(max_examples=40)
@given(**grouped, data=st.data())
@pytest.mark.slow
def test_groups_of_gis(
    require_sound: Callable[[Schedule], None],
    ranks: int,
    groups: int,
    chunks: int,
    costs: Costs,
    data: st.DataObject,
) -> None:
    group = data.draw(st.integers(-(-ranks // 2), 2 * ranks))
    forward, backward_input, _ = costs = costs if group >= ranks else (costs[0], costs[0], costs[0])
    options = {"chunks": chunks, "group": group}
    require_sound(make_schedule("gis", ranks=ranks, microbatches=groups * group - group // 2, **options))
    schedule = make_schedule("gis", ranks=ranks, microbatches=groups * group, **options)
    timeline = simulate(schedule, CostModel.even(schedule.placement, *costs))
    bubble = (ranks - 1) * (forward + backward_input) + max(ranks - group, 0) * (chunks - 1) * forward
    assert timeline.makespan - timeline.work == pytest.approx(bubble / chunks)
    peaks = [min(group * (chunks - 1) + ranks - rank, groups * group * chunks) for rank in range(ranks)]
    assert [peak * chunks for peak in timeline.peak_activations] == pytest.approx(peaks)


@pytest.mark.parametrize("name", ["1f1b", "interleaved-1f1b"])
@settings(max_examples=20)
@given(ranks=st.integers(1, 6), groups=st.integers(1, 3), extra=st.integers(0, 6), costs=all_costs)
def test_an_extra_forward_costs_an_activation_at_most_and_no_time(
    name: str, ranks: int, groups: int, extra: int, costs: Costs
) -> None:
    """Where transfers are slow it saves time, in 1f1b; in interleaved-1f1b, only the first is sure not to cost any."""
    for transfer, number in ((0, extra), (0.5, extra if name == "1f1b" else 0)):
        fewer, more = (
            simulate(schedule, CostModel.even(schedule.placement, *costs, transfer=transfer))
            for schedule in (
                make_schedule(name, ranks=ranks, microbatches=groups * ranks, extra_warmup=number + one)
                for one in (0, 1)
            )
        )
        for before, after in zip(fewer.peak_activations, more.peak_activations, strict=True):
            assert before <= after <= before + 1 / fewer.placement.chunks_per_rank
        assert more.makespan <= fewer.makespan + 1e-9
