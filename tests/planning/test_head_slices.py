"""Plans of a head that computes logits by slices of tokens: what it keeps, what is there at once, and its time."""

from __future__ import annotations

import pytest

from pipeflow import GPT, UsageError, make_schedule
from pipeflow.planning.estimate import plan
from pipeflow.planning.kept import deferred_bytes, saved_bytes
from pipeflow.planning.physical import stage_costs
from pipeflow.planning.rank_memory import held_by
from pipeflow.planning.setup import PRECISIONS, Setup
from pipeflow.planning.shares import Share, stage_layers

WORDS, WIDTH, TOKENS = 10_000, 64, 256
MODEL = GPT(4, WIDTH, 4, TOKENS, WORDS, norm="rms", dropout=False)
LAST = Share(("dense",), first=False, last=True)


def setup(slices: int, **options: object) -> Setup:
    return Setup(head_slices=slices, precision=PRECISIONS["float32"], **options)  # type: ignore[arg-type]  # of any type


def test_the_last_stage_keeps_gradients_in_place_of_logits() -> None:
    whole, sliced = (saved_bytes(MODEL, setup(slices), LAST) for slices in (1, 4))
    assert (whole - sliced) * TOKENS == pytest.approx(4 * WORDS * TOKENS - 4 * WORDS * WIDTH)
    assert saved_bytes(MODEL, setup(4), LAST) == saved_bytes(MODEL, setup(8), LAST)


def test_frozen_weights_leave_the_gradient_of_the_input_alone() -> None:
    whole, sliced = (saved_bytes(MODEL, setup(slices, frozen=True), LAST) for slices in (1, 4))
    assert whole - sliced == 4 * WORDS - 4 * WIDTH


def test_nothing_of_the_head_waits_for_its_weight_gradient() -> None:
    whole, sliced = (deferred_bytes(MODEL, setup(slices), LAST) for slices in (1, 4))
    assert whole - sliced == 4 * (WORDS + WIDTH)
    first = Share(("dense",), first=True, last=False)
    assert deferred_bytes(MODEL, setup(1), first) == deferred_bytes(MODEL, setup(4), first)


def test_one_slice_of_logits_is_there_at_once() -> None:
    placement = make_schedule("1f1b", ranks=2, microbatches=2).placement
    parts = stage_layers(MODEL, placement, "uniform")
    assert [held_by(MODEL, setup(4), placement, parts, rank).recomputed_bytes for rank in (0, 1)] == [
        0,
        4 * WORDS * TOKENS // 4,
    ]
    assert held_by(MODEL, setup(1), placement, parts, 1).recomputed_bytes == 0


@pytest.mark.parametrize("frozen", [False, True])
def test_the_forward_takes_the_time_of_the_whole_head(frozen: bool) -> None:
    placement = make_schedule("zb-h1", ranks=2, microbatches=2).placement
    whole, sliced = (stage_costs(MODEL, placement, setup(slices, frozen=frozen)) for slices in (1, 4))
    halves = [(each.forward, each.backward_input, each.backward_weight) for each in (whole, sliced)]
    assert [sum(its[0] for its in each) for each in halves] == pytest.approx([sum(its[0] for its in halves[0])] * 2)
    assert sum(its[1] for its in halves[0]) == pytest.approx(sum(its[1] for its in halves[1]))
    gains = [its[1] - before[1] for before, its in zip(*halves, strict=True)]
    head = whole.forward[1] - whole.forward[0]
    assert gains == pytest.approx([(1 if frozen else 2) * head, -head, 0 if frozen else -head])


def test_the_peak_of_a_plan_is_less_and_its_time_the_same() -> None:
    schedule = make_schedule("1f1b", ranks=2, microbatches=4)
    whole, sliced = (plan(MODEL, schedule, setup(slices)) for slices in (1, 8))
    assert sliced.ranks[1].peak_bytes < whole.ranks[1].peak_bytes - 0.5 * 4 * WORDS * TOKENS
    assert sliced.timeline.makespan == pytest.approx(whole.timeline.makespan)


def test_slices_are_at_least_one() -> None:
    with pytest.raises(UsageError, match="head_slices"):
        setup(0)
