"""A plan of microbatches in slices: less idle time and memory, and products that are less efficient."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from pipeflow import GPT, Cluster, Plan, Setup, UsageError, make_schedule, model_named, plan
from pipeflow.core.schedule import Schedule
from pipeflow.planning.estimate import breakdown
from pipeflow.planning.libraries import LIBRARIES
from pipeflow.planning.libraries.own import script

LLAMA = model_named("llama3-8b")
SETUP = Setup(tensor=4, data=2, sequence=8192)
H100 = Cluster.of("h100-80gb")


def sliced(slices: int, microbatches: int = 8) -> Schedule:
    return make_schedule("1f1b", ranks=4, microbatches=microbatches, slices=slices)


def planned(slices: int, setup: Setup = SETUP) -> Plan:
    return plan(LLAMA, sliced(slices), setup, cluster=H100)


def test_more_slices_leave_less_idle_and_keep_less_but_compute_longer() -> None:
    plans = [planned(slices, replace(SETUP, sequence=32768)) for slices in (1, 2, 4, 8)]
    busy = [max(found.ranks, key=lambda each: -each.idle) for found in plans]
    for fewer, more in pairwise(plans):
        assert more.makespan_bubble_ratio < fewer.makespan_bubble_ratio
        assert more.peak_bytes < fewer.peak_bytes
        assert more.cost.forward[1] > fewer.cost.forward[1]
    assert busy[0].idle > 2 * busy[2].idle
    seconds = [found.step_seconds or 0.0 for found in plans]
    assert min(seconds) == seconds[2]  # with 8, products are small


def test_the_share_of_attention_is_that_of_its_operations_where_nothing_depends_on_sizes() -> None:
    found = plan(LLAMA, sliced(4), SETUP)
    attended, others = LLAMA.attention_flops(8192), LLAMA.linear_flops
    assert found.cost.attention == pytest.approx(attended / (attended + others))
    assert plan(LLAMA, sliced(1), SETUP).cost.attention == 0
    whole = plan(LLAMA, sliced(1, 16), SETUP).timeline.makespan
    gain = whole / plan(LLAMA, sliced(4, 16), SETUP).timeline.makespan
    assert gain == pytest.approx(4 * (16 + 3) / (16 * 4 + 3), rel=0.03)


def test_attention_takes_as_long_as_in_whole_microbatches() -> None:
    """What depends on the size of products is all but attention, so without attention the costs differ as much."""
    short, long = (replace(SETUP, sequence=tokens) for tokens in (8192, 32768))
    shares = [planned(4, setup).cost.attention for setup in (short, long)]
    assert shares[0] < shares[1] < 1
    added = [planned(4, setup).cost.forward[1] - planned(1, setup).cost.forward[1] for setup in (short, long)]
    assert 0 < added[1] < 1.5 * added[0]  # products of 4 times as many tokens, which lose less


def test_the_parts_of_a_step_are_all_of_it() -> None:
    found = planned(4)
    parts = breakdown(found)
    assert parts.seconds == pytest.approx(found.step_seconds)
    assert parts.parts["attention"] == pytest.approx(breakdown(planned(1)).parts["attention"], rel=0.02)
    assert all(value > -1e-4 for value in parts.parts.values()), parts.parts


def test_a_script_cuts_where_the_plan_does() -> None:
    found = planned(4)
    lines = script(found, {"slices": 4}).text
    assert f"attention={found.cost.attention:.3f}" in lines
    assert "share_tokens(module), schedule, example=batch" in lines
    assert "cost=cost" in lines
    compile(lines, "script", "exec")
    with pytest.raises(UsageError, match="does not have '1f1b' on 4 ranks with 8 microbatches of 4 slices"):
        LIBRARIES["megatron"].options(found)


@pytest.mark.parametrize(
    ("model", "setup", "message"),
    [
        ("vit-l16", Setup(), "ViT is no causal model: make it with slices=1"),
        ("llama3-8b", Setup(context=2), "context ranks need whole microbatches: plan with context=1 or slices=1"),
        ("llama3-8b", Setup(sequence=3), "a sequence has 3 tokens: use fewer slices"),
    ],
)
def test_what_has_no_slices_is_refused(model: str, setup: Setup, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        plan(model_named(model), sliced(4), setup)


def test_a_model_of_gpt_has_slices_without_a_cluster() -> None:
    found = plan(GPT.named("gpt3-2.7b"), sliced(2))
    assert found.makespan_bubble_ratio < plan(GPT.named("gpt3-2.7b"), sliced(1)).makespan_bubble_ratio
