"""Slices of microbatches: schedules, their checks, times and memory, and cuts of equal cost."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, product
from typing import Any

import pytest

from pipeflow.core.action import Action, Kind
from pipeflow.core.analysis.lowering import lower
from pipeflow.core.analysis.measured_step import executed_schedule, measured_costs
from pipeflow.core.analysis.simulation import simulate, simulate_shared
from pipeflow.core.cost import CostModel
from pipeflow.core.dataflow import Content
from pipeflow.core.errors import UsageError
from pipeflow.core.schedule import Schedule
from pipeflow.core.slices import attention_share, equal_slices, shares_of
from pipeflow.core.soundness.transfers import verify_programs
from pipeflow.core.soundness.verification import missing, verify
from pipeflow.core.timeline import Timeline
from pipeflow.schedules import make_schedule
from pipeflow.schedules.orders.additions import with_optimizer_step, with_recompute
from pipeflow.schedules.registry import recognised

SLICED = "seq1f1b", "1f1b", "interleaved-1f1b", "zb-h1", "zb-v"


@pytest.mark.parametrize("name", SLICED)
def test_sliced_schedules_of_any_size_are_sound(name: str) -> None:
    for ranks, microbatches, slices in product((1, 2, 5), (1, 2, 7), (2, 3, 8)):
        schedule = make_schedule(name, ranks=ranks, microbatches=microbatches, slices=slices)
        assert (schedule.num_microbatches, schedule.slices) == (microbatches, slices)
        assert verify(schedule) == []
        assert verify_programs(lower(schedule)) == []


@pytest.mark.parametrize("name", SLICED)
def test_one_slice_is_a_whole_microbatch(name: str) -> None:
    whole, one = (make_schedule(name, ranks=4, microbatches=6, **cut) for cut in ({}, {"slices": 1}))
    assert whole == one
    assert whole.to_csv() == one.to_csv()
    assert "." not in one.to_csv()
    assert simulate(whole).to_json() == simulate(one).to_json()


@pytest.mark.parametrize("name", SLICED)
def test_more_slices_are_faster_and_keep_less(name: str) -> None:
    timelines = [simulate(make_schedule(name, ranks=4, microbatches=8, slices=slices)) for slices in (1, 2, 4, 8)]
    for before, after in pairwise(timelines):
        assert after.makespan < before.makespan
        assert max(after.peak_activations) < max(before.peak_activations)
        assert after.work == pytest.approx(before.work)


@pytest.mark.parametrize(
    ("attention", "slices", "equally_long", "peak"),
    [
        (0, 4, 53.25, 2.75),
        (0, 8, 50.62, 1.88),
        (0.5, 4, 72.1, 2.98),
        (0.5, 8, 71.5, 2.12),
        (0.8, 4, 83.4, 3.12),
        (0.8, 8, 84.0, 2.25),
    ],
)
def test_equal_cost_keeps_the_gain_that_attention_takes_from_equal_lengths(
    attention: float, slices: int, equally_long: float, peak: float
) -> None:
    schedule = make_schedule("seq1f1b", ranks=8, microbatches=16, slices=slices)
    cost = replace(CostModel.even(schedule.placement), attention=attention)
    even = replace(cost, slice_ends=tuple(range(1, slices + 1)))
    assert simulate(schedule, even).makespan == pytest.approx(equally_long, abs=0.05)
    cut = simulate(schedule, cost)
    given = simulate(schedule, replace(cost, slice_ends=equal_slices(2**20, slices, attention=attention)))
    assert cut.makespan == pytest.approx(given.makespan, rel=1e-4)
    assert cut.makespan == pytest.approx((16 * slices + 7) * 3 / slices, abs=0.001)
    assert max(cut.peak_activations) == pytest.approx(peak, abs=0.01)


def test_slices_wait_for_each_other() -> None:
    early = Schedule.from_csv("0F0.1,0F0.0,0B0.1,0B0.0")
    assert "needs the keys and values of 0F0.0" in str(verify(early)[0])
    forward_order = Schedule.from_csv("0F0.0,0F0.1,0B0.0,0B0.1")
    assert "needs the gradient of keys and values of 0B0.1" in str(verify(forward_order)[0])


def test_tables_and_timelines_keep_slices() -> None:
    schedule = make_schedule("zb-v", ranks=2, microbatches=3, slices=3).with_reductions()
    schedule = with_optimizer_step(schedule)
    assert verify(schedule) == []
    assert Schedule.from_csv(schedule.to_csv(), schedule.placement, name="zb-v") == schedule
    timeline = simulate(schedule)
    assert Timeline.from_json(timeline.to_json()) == timeline
    assert executed_schedule(timeline.from_json(timeline.to_json())).slices == 3
    assert Action.parse("2F0.3") == Action(Kind.F, 2, 0, 3)
    assert verify(with_recompute(schedule)) == []


def test_wrong_slices_are_told() -> None:
    whole = make_schedule("1f1b", ranks=1, microbatches=1)
    assert "0F0 does not exist" in str(verify(replace(whole, slices=2))[0])
    sliced = make_schedule("1f1b", ranks=1, microbatches=1, slices=2)
    assert "0F0.0 does not exist" in str(verify(replace(sliced, slices=1))[0])
    lacks = replace(sliced, rows=(sliced.rows[0][:-1],))
    assert [str(action) for _, action in missing(lacks)] == ["0B0.0"]
    with pytest.raises(UsageError, match="slice_ends has 3 numbers, but the schedule has 2 slices"):
        simulate(sliced, replace(CostModel.even(sliced.placement), slice_ends=(1, 2, 3)))
    with pytest.raises(UsageError, match="does not say how long its slices are"):
        measured_costs(replace(simulate(sliced), slice_lengths=()))


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("ends", [(), (1, 2, 4)], ids=["equal cost", "given"])
def test_costs_of_a_simulation_in_slices_are_measured_again(name: str, ends: tuple[float, ...]) -> None:
    schedule = make_schedule(name, ranks=3, microbatches=4, slices=3).with_reductions()
    halves: Any = {"backward_input": (1.2, 2.4, 1.2), "backward_weight": (0.8, 1.6, 0.8)}
    cost = CostModel((1.0, 2.0, 1.0), **halves, latency=0.1, reduce=(3.0, 3.0, 3.0), attention=0.4, slice_ends=ends)
    ran = simulate(schedule, cost)
    found = measured_costs(ran)
    assert found.forward == pytest.approx(cost.forward)
    assert found.reduce == pytest.approx(cost.reduce)
    assert sum(found.backward_input + found.backward_weight) == pytest.approx(8)
    assert found.attention == pytest.approx(0.4)
    assert simulate(schedule, found).makespan == pytest.approx(ran.makespan)
    assert simulate(schedule, found).peak_activations == pytest.approx(ran.peak_activations)


def test_the_work_of_the_engine_between_slices_is_a_part_of_their_costs() -> None:
    schedule = make_schedule("1f1b", ranks=1, microbatches=3, slices=4)
    ran = simulate(schedule, CostModel.even(schedule.placement))
    [row] = ran.rows
    later = [0.1 * (number + 1) for number in range(len(row))]
    moved = [replace(span, start=span.start + late, end=span.end + late) for span, late in zip(row, later, strict=True)]
    found = measured_costs(replace(ran, rows=(tuple(moved),)))
    assert found.forward == pytest.approx((1.4,))
    assert simulate(schedule, found).makespan == pytest.approx(moved[-1].end)


def test_what_differs_between_microbatches_in_slices_is_measured() -> None:
    """Equally long slices of a causal model do not take equally long, which is not late; a slice that is late counts
    for its microbatch, and a microbatch whose slices all take longer has a factor.
    """
    schedule = make_schedule("1f1b", ranks=2, microbatches=6, slices=4)
    cost = replace(CostModel.even(schedule.placement), attention=0.8, slice_ends=(1, 2, 3, 4))
    assert not measured_costs(simulate(schedule, cost), late_apart=True).late
    late = replace(cost, late={"1F3": 8.0, "0I4": 6.0, "0W4": 6.0})
    found = measured_costs(simulate(schedule, late), late_apart=True)
    assert found.forward == pytest.approx(cost.forward)
    assert found.late == pytest.approx(late.late)
    factors = (1, 1, 3, 1, 1, 1)
    found = measured_costs(simulate(schedule, replace(cost, microbatch_factors=factors)), by_microbatch=True)
    assert found.microbatch_factors == pytest.approx(factors)
    assert found.forward == pytest.approx(cost.forward)


def test_slices_count_in_transfers_caps_and_shared_processors() -> None:
    schedule = make_schedule("seq1f1b", ranks=2, microbatches=2, slices=4)
    assert verify(schedule, memory_cap=1.25) == []
    assert verify(schedule, memory_cap=1.2)
    cost = CostModel.even(schedule.placement)
    slow = replace(cost, activation_bytes=(4.0, 4.0), bandwidth=4.0)
    first = next(span for span in simulate(schedule, slow).rows[1])
    assert first.start == pytest.approx(0.5)  # a quarter of a forward, and of a transfer
    unlike = replace(cost, attention=0.5, slice_ends=(1, 2, 3, 4))
    assert simulate_shared(schedule, unlike, 64).makespan == pytest.approx(simulate(schedule, unlike).makespan)


def test_each_slice_is_recomputed_by_itself() -> None:
    """What one slice computes again is kept from then on; the others still keep their inputs alone."""
    schedule = with_recompute(make_schedule("1f1b", ranks=1, microbatches=1, slices=4))
    cost = CostModel.even(schedule.placement, saved_bytes=16, input_bytes=1)
    assert simulate(schedule, cost).peak_bytes == (4 + 3 * 0.25,)


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_slices_share_buffers_of_keys_and_of_their_gradients(name: str) -> None:
    """Keys of all tokens are in memory from the first forward on, and gradients of those before the last slice from
    the first backward on; both until the first slice's backward ends.
    """
    schedule = make_schedule(name, ranks=1, microbatches=1, slices=4)
    cost = replace(CostModel.even(schedule.placement, saved_bytes=40, deferred_bytes=0), slice_ends=(4, 7, 9, 10))
    alone = simulate(schedule, cost).peak_bytes[0]
    assert alone == pytest.approx(40)
    keys = simulate(schedule, replace(cost, kept_bytes={Content.KEYS: (100.0,)}))
    assert keys.peak_bytes == pytest.approx((140,))
    both = simulate(schedule, replace(cost, kept_bytes={Content.KEYS: (100.0,), Content.KEYS_GRADIENT: (1000.0,)}))
    assert both.peak_bytes == pytest.approx((1040,))
    curve = dict(both.memory(0))
    assert curve[0] == pytest.approx(100 + 16)
    first = next(span for span in both if span.action.kind in (Kind.B, Kind.I))
    assert curve[first.end] == pytest.approx(100 + 36 + 900)
    assert [*curve.values()][-1] == pytest.approx(0)


def test_buffers_of_whole_microbatches_take_nothing() -> None:
    schedule = make_schedule("1f1b", ranks=2, microbatches=2)
    cost = CostModel.even(schedule.placement, saved_bytes=4)
    kept = replace(cost, kept_bytes={Content.KEYS: (9.0, 9.0)})
    assert simulate(schedule, kept).peak_bytes == simulate(schedule, cost).peak_bytes


def test_a_table_of_slices_is_recognised() -> None:
    schedule = make_schedule("seq1f1b", ranks=2, microbatches=3, slices=2)
    assert recognised(schedule)[:1] == ("1f1b with slices=2",)
    assert "seq1f1b with slices=2" in recognised(schedule)
    assert not any("seq1f1b" in name for name in recognised(make_schedule("1f1b", ranks=2, microbatches=3)))


@pytest.mark.parametrize(
    ("tokens", "slices", "attention", "multiple"), [(1000, 7, 0.3, 1), (4096, 8, 0.9, 64), (9, 9, 1, 1)]
)
def test_cuts_of_equal_cost(tokens: int, slices: int, attention: float, multiple: int) -> None:
    ends = equal_slices(tokens, slices, attention=attention, multiple_of=multiple)
    assert (len(ends), ends[-1]) == (slices, tokens)
    assert sorted({*ends}) == [*ends]
    assert all(end % multiple == 0 for end in ends[:-1])
    if tokens > slices:
        assert max(shares_of(ends, attention)) * slices < 1 + 2.5 * multiple * slices / tokens


def test_wrong_cuts_are_refused() -> None:
    with pytest.raises(UsageError, match="too few for 5 slices of at least a token"):
        equal_slices(4, 5)
    with pytest.raises(UsageError, match="attention is a share"):
        equal_slices(4, 2, attention=1.5)
    with pytest.raises(UsageError, match="must grow"):
        replace(CostModel.even(make_schedule("1f1b", ranks=1, microbatches=1).placement), slice_ends=(2, 1))


def test_the_share_of_attention_follows_from_measured_costs() -> None:
    times = {length: 3 * length + 2e-3 * length**2 for length in (500, 1000, 4000)}
    assert attention_share(times, 1500) == pytest.approx(0.5)
    with pytest.raises(UsageError, match="at least two lengths"):
        attention_share({1000: 1.0}, 1000)
