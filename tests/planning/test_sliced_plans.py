"""A plan of microbatches in slices: less idle time and memory, and products that are less efficient."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from pipeflow import GPT, Cluster, Plan, Setup, UsageError, make_schedule, model_named, plan
from pipeflow.core.action import Kind
from pipeflow.core.dataflow import Content
from pipeflow.core.schedule import Schedule
from pipeflow.planning.estimate import breakdown
from pipeflow.planning.layout import Wanted
from pipeflow.planning.layout_ties import TIE, plainer
from pipeflow.planning.layouts import find_layouts
from pipeflow.planning.libraries import LIBRARIES
from pipeflow.planning.libraries.own import script
from pipeflow.planning.physical import rates_of
from pipeflow.planning.setup import Checkpoint, ContextKind

LLAMA = model_named("llama3-8b")
SETUP = Setup(tensor=4, data=2, sequence=8192)
H100 = Cluster.of("h100-80gb")
PUBLISHED_RATES = rates_of(H100, SETUP)


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
    whole, cut = (each.step_parts.tensor for each in (planned(1), found) if each.step_parts is not None)
    assert whole < cut < 2 * whole  # as many bytes, in more messages
    assert all(value > -1e-4 for value in parts.parts.values()), parts.parts


def test_a_script_cuts_where_the_plan_does() -> None:
    found = planned(4)
    lines = script(found, {"slices": 4}).text
    assert f"attention={found.cost.attention:.3f}" in lines
    assert "huggingface.share_tokens(module)" in lines
    assert "cost=cost" in lines
    compile(lines, "script", "exec")
    with pytest.raises(UsageError, match="does not have '1f1b' on 4 ranks with 8 microbatches of 4 slices"):
        LIBRARIES["megatron"].options(found)


@pytest.mark.parametrize(
    ("model", "setup", "message"),
    [
        ("vit-l16", Setup(), "slices=4 need a causal model, and ViT is none: use slices=1"),
        (
            "llama3-8b",
            Setup(context=2),
            "no plan has slices=4 in a ring of context ranks: use context_kind 'gather' or 'all-to-all', or slices=1",
        ),
        (
            "llama3-8b",
            Setup(context=2, zero=3, context_kind="gather"),
            "slices=4 run under fully_shard without context ranks alone: use zero=1 or context=1",
        ),
        (
            "llama3-8b",
            Setup(sequence=12, context=2, context_kind="gather"),
            "slices=4 are too many for a sequence of 12",
        ),
        ("llama3-8b", Setup(sequence=3), "slices=4 are too many for a sequence of 3 tokens: use fewer"),
    ],
)
def test_what_has_no_slices_is_refused(model: str, setup: Setup, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        plan(model_named(model), sliced(4), setup)


def test_a_model_of_gpt_has_slices_without_a_cluster() -> None:
    found = plan(GPT.named("gpt3-2.7b"), sliced(2))
    assert found.makespan_bubble_ratio < plan(GPT.named("gpt3-2.7b"), sliced(1)).makespan_bubble_ratio


def test_a_search_finds_what_slices_make_possible() -> None:
    """Slices keep less, so layouts fit that recompute nothing. ZeRO-3 over context ranks is not tried with them."""
    given: Any = {"setup": Setup(sequence=32768), "tensor": 4, "pipeline": 4, "memory": 32e9}
    tasks = [Wanted(LLAMA, H100, 16, 16, **given, slices=slices) for slices in (1, 4)]
    whole, cut = (find_layouts(task, top=1).ranked[0] for task in tasks)
    assert (whole.layout.checkpoint, cut.layout.checkpoint) == ("full", "none")
    assert cut.layout.options["slices"] == 4
    assert cut.plan.step_seconds is not None
    assert cut.plan.step_seconds < 0.95 * (whole.plan.step_seconds or 0.0)
    refused: Any = {"context_kind": "ring"}, {"zero": 3}
    for change in refused:
        with pytest.raises(UsageError, match="slices=4"):
            Wanted(LLAMA, H100, 16, 16, setup=Setup(sequence=32768), slices=4, context=2, **change)


@pytest.mark.parametrize("kind", ["gather", "all-to-all"])
def test_slices_over_context_ranks_send_as_much_in_more_messages(kind: ContextKind) -> None:
    setup = Setup(tensor=1, context=4, context_kind=kind, sequence=65536)
    whole, cut = (planned(slices, setup) for slices in (1, 4))
    assert whole.step_seconds is not None
    assert cut.step_seconds is not None
    assert cut.step_seconds < 0.9 * whole.step_seconds
    sent = [each.step_parts.tensor for each in (whole, cut) if each.step_parts is not None]
    known = PUBLISHED_RATES.efficiency
    start = known.collective / 2 + 3 * H100.link_latency if kind == "gather" else known.collective + H100.link_latency
    messages = 2 * 8 * 8  # there and back, of a rank's layers and microbatches
    assert sent[1] - sent[0] == pytest.approx(messages * 3 * start, rel=0.02)
    keys = 2.0 * 65536 * 2 * 1024 * 8 / (1 if kind == "gather" else 4)  # a rank's layers; all tokens, or a quarter
    assert cut.cost.kept_bytes[Content.KEYS] == (keys,) * 4


def test_slices_with_zero_3_gather_each_stage_as_often_as_whole_microbatches() -> None:
    setup = Setup(tensor=2, data=4, sequence=65536)
    plans = {(zero, slices): planned(slices, replace(setup, zero=zero)) for zero in (1, 3) for slices in (1, 4)}
    gathers = {key: sum(each.action.kind is Kind.U for each in found.timeline) for key, found in plans.items()}
    assert gathers[3, 4] == gathers[3, 1] > 0
    assert plans[3, 4].cost.unshard == plans[3, 1].cost.unshard
    assert plans[3, 4].step_seconds == pytest.approx(plans[1, 4].step_seconds, rel=0.02)
    states = [sum(rank.weight_bytes + rank.optimizer_bytes for rank in plans[zero, 4].ranks) for zero in (1, 3)]
    assert states[1] < states[0]


def test_layers_that_are_divided_are_gathered_for_each_slice() -> None:
    """On one pipeline rank, where each microbatch gathers its layers."""
    setup = Setup(data=8, zero=3, sequence=32768, overlap=False)
    parts = [plan(LLAMA, make_schedule("1f1b", ranks=1, microbatches=4, slices=q), setup, cluster=H100) for q in (1, 4)]
    whole, cut = (each.step_parts.sharding for each in parts if each.step_parts is not None)
    assert cut == pytest.approx(4 * whole, rel=0.01)
    assert breakdown(parts[1]).seconds == pytest.approx(parts[1].step_seconds)


def test_a_search_tries_slices_over_context_ranks_and_with_zero_3() -> None:
    given: Any = {"setup": Setup(sequence=65536), "tensor": 4, "pipeline": 4, "slices": 4, "schedules": ("1f1b",)}
    over = find_layouts(Wanted(LLAMA, H100, 32, 16, **given, context=2, zero=1), top=3).ranked
    assert over
    assert {each.layout.setup.context_kind for each in over} <= {"gather", "all-to-all"}
    divided = find_layouts(Wanted(LLAMA, H100, 32, 16, **given, context=1, zero=3), top=1).ranked
    assert divided[0].layout.options["slices"] == 4


def test_the_lines_name_how_attention_sees_other_context_ranks() -> None:
    """As planned; but a ring of pipeflow has no kernel on GPUs, so there it is what takes the least time by plan."""
    schedule = make_schedule("1f1b", ranks=4, microbatches=8)

    def named(model: Any, kind: ContextKind, context: int, cluster: Cluster | None = H100) -> tuple[str, bool]:
        setup = Setup(context=context, context_kind=kind, sequence=16384, tensor=2)
        found = script(plan(model, schedule, setup, cluster=cluster), {})
        word = found.text.split('context_attention="')[1].split('"')[0]
        return word, any("no kernel on GPUs" in note for note in found.notes)

    many_keys = replace(LLAMA, kv_heads=32)
    assert named(LLAMA, "gather", 2) == ("gather", False)
    assert named(LLAMA, "all-to-all", 2) == ("all_to_all", False)
    assert named(LLAMA, "ring", 2) == ("gather", True)  # 8 heads of keys for 32 of queries
    assert named(many_keys, "ring", 4) == ("all_to_all", True)
    assert named(many_keys, "ring", 4, None) == ("gather", True)
    host = replace(H100, device=replace(H100.device, runs_ahead=False))
    assert named(LLAMA, "ring", 2, host) == ("ring", False)


@pytest.mark.parametrize("checkpoint", ["none", "full", "op"])
def test_plans_count_the_buffers_of_keys(checkpoint: Checkpoint) -> None:
    """Each of a rank's 8 layers has 8 heads of keys and of values, a quarter of which are here, in 16 bits."""
    whole, cut = (planned(slices, replace(SETUP, checkpoint=checkpoint)).cost for slices in (1, 4))
    keys = 2.0 * 8192 * 8 * 2 * 1024 / 4
    assert cut.kept_bytes[Content.KEYS] == cut.kept_bytes[Content.KEYS_GRADIENT] == (keys,) * 4
    kept = {"none": keys, "full": 0.0, "op": keys / 2}[checkpoint]
    assert cut.saved_bytes == pytest.approx([each - kept for each in whole.saved_bytes])
    without = plan(LLAMA, sliced(4), replace(SETUP, checkpoint=checkpoint))  # in other units, but the same bytes
    assert (without.cost.saved_bytes, without.cost.kept_bytes) == (cut.saved_bytes, cut.kept_bytes)


def test_a_search_tries_slices_of_long_sequences_and_recommends_those_that_gain() -> None:
    given: Any = {"setup": Setup(sequence=32768), "tensor": 4, "pipeline": 4, "memory": 32e9}
    found, whole = (find_layouts(Wanted(LLAMA, H100, 16, 16, **given, slices=cut), top=1) for cut in (None, 1))
    assert found.recommended.layout.options["slices"] > 1
    assert found.recommended.step_seconds < whole.fastest.step_seconds / (1 + TIE)
    short = replace(SETUP, sequence=4096)
    tasks = [Wanted(LLAMA, H100, 16, 16, **given | {"setup": short}, slices=cut) for cut in (None, 1)]
    assert len({find_layouts(task, top=1).simulated for task in tasks}) == 1


def test_slices_that_gain_little_are_not_recommended() -> None:
    given: Any = {"setup": Setup(sequence=32768), "tensor": 4, "pipeline": 2, "schedules": ("1f1b",)}
    found = find_layouts(Wanted(LLAMA, H100, 8, 32, **given), top=5)
    fastest, recommended = found.fastest.layout, found.recommended.layout
    assert fastest.options["slices"] > 1
    assert "slices" not in recommended.options
    assert "whole sequences" in plainer(recommended, fastest)
