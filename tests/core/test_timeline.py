from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import pytest

from pipeflow.core.action import Action
from pipeflow.core.analysis.idle_time import causes, critical_path
from pipeflow.core.analysis.simulation import simulate
from pipeflow.core.cost import CostModel
from pipeflow.core.dataflow import Stream
from pipeflow.core.errors import UsageError
from pipeflow.core.placement import Placement
from pipeflow.core.schedule import Schedule
from pipeflow.core.timeline import Span, Timeline
from pipeflow.schedules import SCHEDULES, make_schedule


def timeline(*rows: str) -> Timeline:
    """From rows like "0F0@0-1 0B0@3-5"."""

    def span(text: str, rank: int) -> Span:
        action, _, times = text.partition("@")
        start, end = times.split("-")
        return Span(Action.parse(action), rank, float(start), float(end))

    spans = tuple(tuple(span(text, rank) for text in row.split()) for rank, row in enumerate(rows))
    return Timeline("by hand", Placement.linear(len(rows)), spans)


def test_the_measures_of_two_ranks() -> None:
    measured = timeline("0F0@1-2 0F1@2-3 0B0@6-8 0B1@9-11", "1F0@3-4 1B0@4-6 1F1@6-7 1B1@7-9")
    assert measured.makespan == 11
    assert measured.span == 10  # rank 0 began at 1
    assert measured.work == 6
    assert measured.bubble_ratio == pytest.approx(0.4)
    assert measured.peak_activations == (2, 1)
    assert [str(cause.span.action) for cause in critical_path(measured)] == ["0F0", "1F0", "1B0", "1F1", "1B1", "0B1"]


def test_a_rank_without_work_and_a_timeline_without_spans_measure_zero() -> None:
    assert timeline("0F0@0-1", "").peak_activations == (1, 0)
    empty = timeline("", "")
    assert (empty.makespan, empty.span, empty.work, empty.bubble_ratio) == (0, 0, 0, 0)
    assert critical_path(empty) == ()


def test_an_activation_ends_with_its_input_gradient() -> None:
    assert timeline("0F0@0-1 0I0@1-2 0F1@2-3 0I1@3-4 0W0@4-5 0W1@5-6").peak_activations == (1,)


def test_memory_is_in_activations_unless_bytes_are_known() -> None:
    spans = timeline("0F0@0-1 0F1@1-2 0I0@2-3 0W0@3-4 0B1@5-6")
    assert spans.memory(0) == ((0, 1), (1, 2), (3, 1), (6, 0))
    with pytest.raises(UsageError, match="give the CostModel saved_bytes"):
        _ = spans.peak_bytes
    sized = replace(spans, saved_bytes=(10.0,), deferred_bytes=(4.0,))
    assert sized.memory(0) == ((0, 10), (1, 20), (3, 14), (4, 10), (6, 0))
    assert sized.peak_bytes == (20,)


def test_what_waiting_weight_gradients_hold_counts_in_bytes_alone() -> None:
    cost = CostModel((1,), (1,), (1,), saved_bytes=(10,), deferred_bytes=(4,))
    planned = simulate(Schedule.from_csv("0F0,0I0,0F1,0I1,0W0,0W1"), cost)
    assert planned.peak_activations == (1,)
    assert planned.peak_bytes == (14,)


def test_the_critical_path_says_who_waited_for_what() -> None:
    planned = simulate(make_schedule("1f1b", ranks=2, microbatches=1), CostModel((1, 1), (1, 1), (1, 1), latency=2))
    assert [str(cause) for cause in critical_path(planned)] == [
        "0F0 on rank 0 began at once",
        "1F0 on rank 1 waited for the activation of stage 0, microbatch 0 from rank 0",
        "1B0 on rank 1 came after 1F0",
        "0B0 on rank 0 waited for the gradient of stage 1, microbatch 0 from rank 1",
    ]


def test_a_pair_begins_when_both_of_its_halves_can() -> None:
    paired = Schedule.from_csv("0F0,(0F1;0B0)OVERLAP_F_B,0B1\n1F0,1B0,1F1,1B1")
    path = [str(cause.span.action) for cause in critical_path(simulate(paired))]
    assert path == ["0F0", "1F0", "1B0", "0F1", "0B0", "1F1", "1B1", "0B1"]
    apart = simulate(paired.without_pairs())
    assert [str(cause.span.action) for cause in critical_path(apart)] == ["0F0", "1F0", "1B0", "1F1", "1B1", "0B1"]
    hidden = CostModel((1, 1), (1, 1), (1, 1), overlap=1)
    assert simulate(paired, hidden).makespan == simulate(paired).makespan - 1


def test_without_backwards_no_activation_is_kept() -> None:
    assert timeline("0F0@0-1 0F1@1-2 0F2@2-3").peak_activations == (1,)


@pytest.mark.some(13)
@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("transfer", [0.0, 0.7])
def test_the_critical_path_reaches_from_the_start_to_the_makespan(name: str, transfer: float) -> None:
    schedule = make_schedule(name, ranks=4, microbatches=6)
    stages = schedule.placement.num_stages
    for seed in range(10):
        draw = random.Random(seed)
        forward, backward_input, backward_weight = (
            tuple(draw.uniform(0.1, 3) for _ in range(stages)) for _ in range(3)
        )
        planned = simulate(schedule, CostModel(forward, backward_input, backward_weight, latency=transfer))
        path = [cause.span for cause in critical_path(planned)]
        assert path[0].start == 0
        assert path[-1].end == planned.makespan
        gaps = [after.start - before.end for before, after in pairwise(path)]
        assert min(gaps) > -1e-9
        assert max(gaps) < transfer + 1e-9


def test_on_a_busy_rank_the_critical_path_stays() -> None:
    noisy = timeline("0F0@0-1 0F1@1.01-2 0B0@4-6 0B1@8.1-10", "1F0@1.1-2 1B0@2.01-4 1F1@4.01-6 1B1@6.02-8")
    assert [str(cause.span.action) for cause in critical_path(noisy)] == ["0F0", "1F0", "1B0", "1F1", "1B1", "0B1"]


def test_on_an_idle_rank_the_critical_path_leads_to_the_sender() -> None:
    """Rank 1 waits for 0F1, whose transfer takes long, though its own 1F0 ended after 0F1 was made."""
    late = timeline("0F0@0-1 0F1@1-2", "1F0@1-3 1F1@5-6")
    assert [str(cause.span.action) for cause in critical_path(late)] == ["0F0", "0F1", "1F1"]


def test_a_pause_of_the_engine_is_no_wait_for_a_value_that_had_arrived() -> None:
    """Rank 0 pauses before 0F1, which needs nothing, and values take 0.2. So 0F1 had long arrived when 1F0 ended."""
    measured = timeline("0F0@0-1 0F1@1.1-2", "1F0@1.2-3 1F1@3.5-4.5")
    assert [str(cause.span.action) for cause in critical_path(measured)] == ["0F0", "1F0", "1F1"]
    just_made = timeline("0F0@0-1 0F1@1.1-2.8", "1F0@1.2-3 1F1@3.5-4.5")
    assert [str(cause.span.action) for cause in critical_path(just_made)] == ["0F0", "0F1", "1F1"]


def test_reductions_count_for_makespan_and_span_and_not_for_work() -> None:
    measured = timeline("0F0@1-2 0B0@6-8 0R0@8-9", "1F0@3-4 1B0@4-6 1R0@6-20")
    assert (measured.makespan, measured.span, measured.work) == (20, 17, 3)
    assert measured.exposed == 12
    assert measured.streams == (Stream.COMPUTE, Stream.REDUCE)
    assert [[str(span.action) for span in row] for row in measured.on(Stream.REDUCE)] == [["0R0"], ["1R0"]]
    assert [str(span.action) for row in measured.on(Stream.COMPUTE) for span in row] == ["0F0", "0B0", "1F0", "1B0"]
    assert [str(cause.span.action) for cause in critical_path(measured)] == ["0F0", "1F0", "1B0", "1R0"]


def test_the_critical_path_ends_in_a_computation_where_reductions_are_hidden() -> None:
    hidden = timeline("0F0@0-1 0B0@4-8 0R0@8-8", "1F0@1-2 1B0@2-4 1R0@4-8")
    assert hidden.exposed == 0
    assert [str(cause.span.action) for cause in critical_path(hidden)] == ["0F0", "1F0", "1B0", "0B0"]


def test_a_measured_reduction_began_after_its_weight_gradient_whatever_the_clocks_say() -> None:
    early = timeline("0F0@0-1 0B0@1-3 0R0@2.9-5")
    assert [str(cause) for cause in causes(early)[0]][-1] == "0R0 on rank 0 came after 0B0"
    assert [str(cause.span.action) for cause in critical_path(early)] == ["0F0", "0B0", "0R0"]


def test_what_follows_from_the_spans_is_worked_out_once_and_is_no_part_of_the_value() -> None:
    planned = simulate(make_schedule("1f1b", ranks=2, microbatches=3))
    fresh = replace(planned)
    assert planned.on(Stream.COMPUTE) is planned.on(Stream.COMPUTE)
    assert planned.memory(1) is planned.memory(1)
    assert (planned.makespan, planned.num_microbatches, planned.streams) == (12, 3, (Stream.COMPUTE,))
    assert planned == fresh
    assert (hash(planned), repr(planned)) == (hash(fresh), repr(fresh))
    assert replace(planned, rows=((), ())).makespan == 0
