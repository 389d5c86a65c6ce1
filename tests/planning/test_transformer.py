from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy
import pytest

from pipeflow import (
    GPT,
    GPT_PRESETS,
    PRECISIONS,
    CostModel,
    Placement,
    Plan,
    Setup,
    UsageError,
    make_schedule,
    plan,
)
from pipeflow.planning.cluster import Cluster
from pipeflow.planning.layer_kinds import routed_layers
from pipeflow.planning.physical import stage_costs
from pipeflow.planning.rank_memory import ALLOCATOR, state_bytes
from pipeflow.planning.setup import Checkpoint
from pipeflow.planning.shares import stage_layers
from pipeflow.schedules import SCHEDULES
from tests.families import make_near

SMALL = GPT(layers=8, hidden=64, heads=4, positions=32, vocabulary=101)


def whole(model: GPT, setup: Setup | None = None, *, stages: int = 1) -> CostModel:
    return stage_costs(model, Placement.linear(stages), setup or Setup())


def planned(name: str = "1f1b", *, ranks: int = 4, microbatches: int = 8, setup: Setup | None = None) -> Plan:
    return plan(SMALL, make_schedule(name, ranks=ranks, microbatches=microbatches), setup)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        # per layer 12 h^2 + 13 h; vocabulary and positions, the last norm
        ("gpt2-small", 12 * (12 * 768**2 + 13 * 768) + (50304 + 1024) * 768 + 2 * 768),
        ("gpt2-small", 124_475_904),
        ("gpt2-xl", 1_557_686_400),
    ],
)
def test_models_have_as_many_parameters_as_their_sizes_say(name: str, parameters: int) -> None:
    assert GPT.named(name).parameters == parameters


def test_gpt_2_has_the_published_number_with_its_own_vocabulary() -> None:
    assert replace(GPT.named("gpt2-small"), vocabulary=50257).parameters == 124_439_808


def test_gpt_3_has_what_narayanan_says() -> None:
    """arXiv 2104.04473, equation 2, which leaves out the last norm."""
    gpt3 = GPT.named("gpt3-175b")
    layers, hidden = gpt3.layers, gpt3.hidden
    said = 12 * layers * hidden**2 * (1 + 13 / (12 * hidden) + (50304 + 2048) / (12 * layers * hidden))
    assert gpt3.parameters == pytest.approx(said + 2 * hidden, rel=1e-12)
    assert 174e9 < gpt3.parameters < 176e9
    assert GPT.named("gpt3") == gpt3


@pytest.mark.parametrize("name", [name for name, model in GPT_PRESETS.items() if model.heads % 2 == 0])
def test_what_the_ranks_hold_adds_up(name: str) -> None:
    """Split, there is the model once, a copy of a tied word table at the other end, padded rows, and on every further
    tensor rank a copy of what is not split: norms, routers, biases of outputs, and what makes latent vectors. Of scans
    without heads these are the norms of steps and of both vectors.
    """
    model, tensor = GPT.named(name), 2
    half = model.layers // 2
    ends = [(0, half)], [(half, model.layers)]
    held = sum(tensor * model.parameters_of(parts, tensor) for parts in ends)
    rows = tensor * -(-model.vocabulary // tensor)
    norm = 2 if model.norm == "layer" else 1
    outputs = 1 + model.experts + model.shared_experts if model.experts > 1 else 2  # of models whose layers are alike
    per_layer = model.norms * norm + outputs * (model.biases == "all")
    whole = model.hidden * (per_layer * model.layers + norm) + 2 * model.head_norms * model.head_width * model.layers
    whole += model.hidden * model.experts * routed_layers(model.kinds)
    if model.kv_rank is not None:
        ranks = model.kv_rank + (model.q_rank or 0)
        whole += model.layers * (model.hidden * (ranks + model.rope_size) + ranks)
    if model.scan_rank is not None:
        whole += (model.pattern or "").count("M") * (model.scan_rank + 2 * (model.scan_state or 0))
    tables = 2 * rows - (1 if model.tied else 2) * model.vocabulary
    assert held == model.parameters + tables * model.hidden + (tensor - 1) * whole


def test_a_stage_in_the_middle_has_layers_alone() -> None:
    assert SMALL.parameters_of([(2, 5)]) == 3 * (12 * 64**2 + 13 * 64)


def test_both_ends_on_one_rank_share_one_word_table() -> None:
    apart = SMALL.parameters_of([(0, 1)]) + SMALL.parameters_of([(7, 8)])
    assert SMALL.parameters_of([(0, 1), (7, 8)]) == apart - 101 * 64
    assert SMALL.parameters_of([(0, 8)]) == SMALL.parameters == planned(ranks=1).ranks[0].parameters
    together = [rank.parameters for rank in planned("zb-v").ranks]
    assert sum(together) == SMALL.parameters
    assert sum(rank.parameters for rank in planned().ranks) == SMALL.parameters + 101 * 64


def per_layer(model: GPT, setup: Setup) -> float:
    """Bytes in units of s*b*h."""
    one, two = (whole(replace(model, layers=layers), setup).saved_bytes[0] for layers in (1, 2))
    sequence = model.positions if setup.sequence is None else setup.sequence
    return (two - one) / (sequence * setup.microbatch_size * model.hidden)


GPT22B, GPT530B, GPT1T = map(GPT.named, ("megatron-22b", "turing-530b", "megatron-1t"))
LARGE = [GPT22B, GPT.named("gpt3-175b"), GPT530B, GPT1T]


@pytest.mark.parametrize("model", LARGE)
@pytest.mark.parametrize("size", [1, 3])
def test_activations_are_those_of_korthikanti(model: GPT, size: int) -> None:
    """arXiv 2205.05198, table 2."""
    scores, t = 5 * model.heads * 2048 / model.hidden, 8
    setup = Setup(keep_scores=True, microbatch_size=size)
    assert per_layer(model, setup) == pytest.approx(34 + scores)
    assert per_layer(model, replace(setup, tensor=t)) == pytest.approx(10 + 24 / t + scores / t)
    assert per_layer(model, replace(setup, tensor=t, sequence_parallel=True)) == pytest.approx((34 + scores) / t)
    assert per_layer(model, replace(setup, tensor=t, checkpoint=True)) == 2
    assert per_layer(model, replace(setup, tensor=t, checkpoint="selective")) == pytest.approx(10 + 24 / t)
    assert per_layer(model, replace(setup, keep_scores=False)) == 34


@pytest.mark.parametrize(("model", "saved"), [(GPT.named("gpt3"), 0.70), (GPT530B, 0.65)])
def test_scores_are_the_part_of_the_activations_that_the_paper_says(model: GPT, saved: float) -> None:
    """arXiv 2205.05198, section 5: what is saved where they are computed again."""
    kept = per_layer(model, Setup()) / per_layer(model, Setup(keep_scores=True))
    assert 1 - kept == pytest.approx(saved, abs=0.005)


@pytest.mark.parametrize("model", LARGE)
def test_sequences_in_parallel_and_no_scores_take_a_fifth(model: GPT) -> None:
    """arXiv 2205.05198, abstract: 5 times less."""
    less = Setup(tensor=8, sequence_parallel=True)
    assert 4.9 < per_layer(model, Setup(tensor=8, keep_scores=True)) / per_layer(model, less) < 6.5


def test_the_ends_keep_what_the_paper_says_they_keep() -> None:
    """Section 4.3: the mask of the embedding's dropout; what goes into the last norm and the head, float32 logits."""
    token = 32 * 64
    first, middle, last = whole(SMALL, stages=8).saved_bytes[0], *whole(SMALL, stages=8).saved_bytes[-2:]
    assert first - middle == token
    assert last - middle == 4 * token + 4 * 32 * 101


def test_the_first_rank_keeps_the_activations_of_the_whole_model() -> None:
    """Section 4.3: under 1f1b those of L layers, L (1 + (p-1) / (p v)) when interleaved."""
    layer, mask = 34 * 32 * 64, 32 * 64
    assert planned().ranks[0].activation_bytes == 8 * layer + 4 * mask
    interleaved = planned("interleaved-1f1b")
    assert interleaved.ranks[0].activation_bytes == 8 * (1 + 3 / (4 * 2)) * layer + 8 * mask


def test_wide_activations_are_twice_as_wide_but_for_masks() -> None:
    wide = Setup(precision=PRECISIONS["float32"], keep_scores=True)
    scores = 4 * 32 / 64
    assert per_layer(SMALL, wide) == 2 * 32 + 2 + (2 * 4 + 1) * scores


@pytest.mark.parametrize("checkpoint", [False, True])
def test_what_is_deferred_is_that_of_the_zero_bubble_paper(checkpoint: bool) -> None:
    """arXiv 2401.10241, table 1: 32sbh per layer; and the tensor ranks share it."""
    middle = [whole(SMALL, Setup(checkpoint=checkpoint, tensor=t), stages=8).deferred_bytes[1] for t in (1, 2)]
    assert middle == [32 * 32 * 64, (8 + 24 / 2) * 32 * 64]


@pytest.mark.parametrize(
    ("name", "ranks", "chunks", "size", "state", "everything", "least"),
    [
        ("megatron-22b", 1, 1, 4, 45.5625, 59.25, 9.5625),
        ("gpt3-175b", 8, 3, 1, 45.5625, 66.84375, 12.3515625),
        ("turing-530b", 35, 3, 1, 31.640625, 114.0234375, 23.076171875),
        ("megatron-1t", 64, 1, 1, 32.958984375, 131.25, 26.5625),
    ],
)
def test_memory_is_what_korthikanti_print(
    name: str, ranks: int, chunks: int, size: int, state: float, everything: float, least: float
) -> None:
    """arXiv 2205.05198, figure 1, in GiB: weights, gradients and optimizer at 18 bytes a parameter; activations without
    recomputation, and with the selective one and sequence parallelism. Tables and head, which the paper leaves out,
    are in these ten percent.
    """
    family, options = ("interleaved-1f1b", {"chunks": chunks}) if chunks > 1 else ("1f1b", {})
    schedule = make_schedule(family, ranks=ranks, microbatches=max(2 * ranks, 2), **options)
    usual = Setup(tensor=8, microbatch_size=size, precision=PRECISIONS["fp16-mixed"], keep_scores=True)
    saving = replace(usual, checkpoint="selective", sequence_parallel=True)
    for setup, activations in ((usual, everything), (saving, least)):
        rank = max(plan(GPT.named(name), schedule, setup).ranks, key=lambda rank: rank.peak_bytes)
        held = rank.weight_bytes + rank.gradient_bytes + rank.optimizer_bytes
        assert held / 2**30 == pytest.approx(state, rel=0.1)
        assert rank.activation_bytes / 2**30 == pytest.approx(activations, rel=0.1)
        assert (held + rank.activation_bytes) / 2**30 == pytest.approx(state + activations, rel=0.06)


def test_selective_recomputation_takes_the_operations_of_attention_and_the_scores_of_one_layer() -> None:
    none, selective = (Setup(tensor=2, microbatch_size=3, keep_scores=True, checkpoint=c) for c in (False, "selective"))
    costs = [stage_costs(SMALL, Placement.linear(8), setup, flops=1.0) for setup in (none, selective)]
    assert costs[1].forward == costs[0].forward
    assert costs[1].backward_weight == costs[0].backward_weight
    assert costs[1].backward_input[1] - costs[0].backward_input[1] == 3 * 32 * 4 * 32 * 64 / 2
    scores = 3 * 32 * 5 * 4 * 32 // 2
    assert costs[0].saved_bytes[1] - costs[1].saved_bytes[1] == scores
    assert planned(setup=selective).ranks[1].recomputed_bytes == scores
    assert planned(setup=replace(selective, keep_scores=False)).ranks[1].recomputed_bytes == scores


def test_programs_in_fp16_keep_scores_in_time_and_memory() -> None:
    old, kept, fused = (
        planned(setup=Setup(precision=PRECISIONS[name], keep_scores=keep)).ranks[1].activation_bytes
        for name, keep in (("fp16", False), ("bf16", True), ("bf16", False))
    )
    assert old == kept > fused


def test_received_tensors_wait_in_memory_of_their_own() -> None:
    """Ends have one neighbour, others two; sequence parallelism passes parts; one rank receives nothing."""
    size = 2 * 32 * 64
    found = planned()
    assert [rank.transfer_bytes for rank in found.ranks] == [size, *[2 * size] * (len(found.ranks) - 2), size]
    split = planned(setup=Setup(tensor=2, sequence_parallel=True))
    assert split.ranks[0].transfer_bytes == size / 2
    assert plan(SMALL, make_schedule("1f1b", ranks=1, microbatches=2)).ranks[0].transfer_bytes == 0
    folded = plan(SMALL, make_schedule("zb-v", ranks=2, microbatches=2)).ranks  # rank 1 passes stage 1 to itself
    assert [rank.transfer_bytes for rank in folded] == [2 * size, 2 * size]


def test_operations_are_those_of_narayanan() -> None:
    """arXiv 2104.04473, section 5.1: 96 B s l h^2 (1 + s/6h + V/16lh) with recomputation; a rank does 1/t of it."""
    gpt3 = GPT.named("gpt3")
    setup = Setup(checkpoint=True, tensor=8, microbatch_size=3)
    cost = stage_costs(gpt3, Placement.linear(8), setup, flops=1e12)
    work = sum(cost.forward) + sum(cost.backward_input) + sum(cost.backward_weight)
    said = 96 * 3 * 2048 * 96 * 12288**2 * (1 + 2048 / (6 * 12288) + 50304 / (16 * 96 * 12288))
    assert work * 1e12 * 8 == pytest.approx(said, rel=1e-12)
    days = work / (3 * 2048) * 8 * 300e9 / 1024 / 140 / 86400
    assert days == pytest.approx(34, abs=1)  # 300 billion tokens on 1024 devices with 140 teraFLOP/s


def test_halves_of_a_backward_are_those_of_the_zero_bubble_paper() -> None:
    """arXiv 2401.10241, table 1: sbh (24h + 4s), sbh (24h + 8s), sbh 24h."""
    forward, backward_input, backward_weight = 24 * 64 + 4 * 32, 24 * 64 + 8 * 32, 24 * 64
    cost = whole(SMALL, stages=8)
    assert cost.forward[1] == 1
    assert cost.backward_input[1] == backward_input / forward
    assert cost.backward_weight[1] == backward_weight / forward
    again = whole(SMALL, Setup(checkpoint=True), stages=8)
    assert again.backward_input[1] == pytest.approx(backward_input / forward + 1)


@pytest.mark.parametrize("name", PRECISIONS)
def test_a_parameter_takes_16_bytes_and_less_when_shared(name: str) -> None:
    """arXiv 1910.02054, section 3.1 and figure 1; two more where gradients are added up in float32."""

    def held(**options: Any) -> tuple[int, int]:
        rank = planned(setup=Setup(precision=PRECISIONS[name], data=4, **options)).ranks[1]
        held = rank.weight_bytes + rank.gradient_bytes + rank.master_bytes + rank.moment_bytes
        in_layer = rank.recomputed_bytes + rank.backward_bytes
        beside = max(rank.activation_bytes + in_layer + rank.transfer_bytes, rank.step_bytes)
        assert rank.peak_bytes == pytest.approx(held + beside + rank.allocator_bytes)
        return rank.parameters, rank.weight_bytes + rank.gradient_bytes + rank.optimizer_bytes

    parameters, total = held()
    optimizer = 8 if name == "float32" else 12
    each = 18 if "mixed" in name else 16
    assert total == each * parameters
    assert held(zero=True) == held(zero=1)
    assert held(zero=1)[1] == (each - optimizer) * parameters + optimizer * -(-parameters // 4)


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_is_planned(name: str) -> None:
    schedule = make_near(name, ranks=4, microbatches=8)
    model = replace(SMALL, layers=2 * schedule.placement.num_stages)
    found = plan(model, schedule, Setup(tensor=2, checkpoint=True))
    copies = len(schedule.placement.paths)
    assert sum(rank.layers for rank in found.ranks) == copies * model.layers
    assert min(rank.idle for rank in found.ranks) == pytest.approx(found.makespan_bubble_ratio)
    most = 0.8 if name == "naive" else 0.6  # one of its 4 ranks is busy
    assert 0 <= found.bubble_ratio <= found.makespan_bubble_ratio < most
    for rank in found.ranks:
        held = rank.weight_bytes + rank.gradient_bytes + rank.optimizer_bytes
        in_layer = rank.recomputed_bytes + rank.backward_bytes
        used = held + max(rank.activation_bytes + in_layer + rank.transfer_bytes, rank.step_bytes)
        assert rank.allocator_bytes == pytest.approx(ALLOCATOR * used)
        assert rank.peak_bytes == pytest.approx(used + rank.allocator_bytes)
        assert rank.recomputed_bytes == (10 + 24 / 2 - 2) * 32 * 64  # its input is kept


@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 3), (4, 2), (4, 8), (8, 64)])
def test_the_even_bubble_is_the_formula_and_the_head_alone_makes_it_differ(ranks: int, microbatches: int) -> None:
    schedule = make_schedule("1f1b", ranks=ranks, microbatches=microbatches)
    formula = (ranks - 1) / (microbatches + ranks - 1)
    with_head = plan(SMALL, schedule)
    assert with_head.even_makespan_bubble_ratio == pytest.approx(formula)
    light = plan(replace(SMALL, vocabulary=1, hidden=4096, positions=1), schedule)
    assert light.makespan_bubble_ratio == pytest.approx(formula, abs=1e-3)
    head, layers = 2 * 101 / (24 * 64 + 4 * 32), 8 / ranks
    if microbatches >= ranks > 1:  # the last rank, which is always busy, waits for one way there and one back
        span = microbatches * (layers + head) + (ranks - 1) * layers
        assert with_head.makespan_bubble_ratio == pytest.approx(1 - microbatches * (layers + head) / span)


def test_operations_per_second_make_seconds() -> None:
    schedule = make_schedule("1f1b", ranks=4, microbatches=8)
    setup = Setup(tensor=2, data=3, microbatch_size=5, sequence=16)
    units, seconds = plan(SMALL, schedule, setup), plan(SMALL, schedule, setup, flops=1e9)
    a_layer = 5 * 16 * (24 * 64**2 + 4 * 16 * 64) / 2 / 1e9
    assert seconds.timeline.makespan == pytest.approx(units.timeline.makespan * a_layer)
    assert seconds.tokens == 8 * 5 * 16 * 3
    assert seconds.tokens_per_second == pytest.approx(seconds.tokens / seconds.timeline.makespan)
    assert units.tokens_per_second is None


@pytest.mark.parametrize("empty", [1, 2])
@pytest.mark.parametrize("checkpoint", ["none", "full"])
@pytest.mark.parametrize("cluster", [None, Cluster.of("a100-80gb")])
def test_the_first_and_the_last_stage_may_have_no_layers(
    empty: int, checkpoint: Checkpoint, cluster: Cluster | None
) -> None:
    """They cost what stands before and after the layers, and no other stage does."""
    setup, schedule = Setup(checkpoint=checkpoint), make_schedule("1f1b", ranks=SMALL.layers + empty, microbatches=4)
    found = plan(SMALL, schedule, setup, cluster=cluster)
    layers = [(layer, layer + 1) for layer in range(SMALL.layers)]
    cut = [*[(0, 0)] * (empty == 2), *layers, (SMALL.layers, SMALL.layers)]
    assert [part for rank in found.ranks for part in rank.parts] == cut
    assert found == plan(SMALL, schedule, setup, cluster=cluster, cut=cut)
    whole = plan(SMALL, make_schedule("1f1b", ranks=SMALL.layers, microbatches=4), setup, cluster=cluster)
    for name in ("forward", "backward_input", "backward_weight"):
        assert sum(getattr(found.cost, name)) == pytest.approx(sum(getattr(whole.cost, name)))
    inner, head = found.ranks[empty - 1 : -1], found.ranks[-1]
    assert {rank.parameters for rank in inner[empty == 1 :]} == {whole.ranks[1].parameters}
    assert head.parameters == whole.ranks[-1].parameters - whole.ranks[1].parameters
    assert head.recomputed_bytes == 0
    assert sum(rank.parameters for rank in found.ranks) == sum(rank.parameters for rank in whole.ranks)


def test_a_cut_by_weights_may_be_of_numpy() -> None:
    placement = make_schedule("gpipe", ranks=2, microbatches=1).placement
    weights = list(numpy.ones(SMALL.layers))
    assert stage_layers(SMALL, placement, weights) == stage_layers(SMALL, placement)


@pytest.mark.parametrize("cut", [(), [(0, 0)], [(0, 0), (0, SMALL.layers), (SMALL.layers, SMALL.layers)]])
def test_a_cut_has_a_part_for_each_stage(cut: Sequence[tuple[int, int]]) -> None:
    said = "2 stages of .* need 2 pairs" if cut else "needs one number for each of the"
    with pytest.raises(UsageError, match=said):
        stage_layers(SMALL, make_schedule("gpipe", ranks=2, microbatches=1).placement, cut)


def test_llama_405b_is_planned_as_it_was_trained() -> None:
    """16 ranks of 8 chunks, 128 stages of 126 layers (arXiv 2407.21783, section 3.3.2)."""
    schedule = make_schedule("interleaved-1f1b", ranks=16, microbatches=16, chunks=8)
    found = plan(GPT.named("llama3.1-405b"), schedule, Setup(tensor=8))
    assert (found.ranks[0].parts[0], found.ranks[-1].parts[-1]) == ((0, 0), (126, 126))
    assert {rank.layers for rank in found.ranks} == {7, 8}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: GPT.named("gpt2-xxl"), "unknown model 'gpt2-xxl'; did you mean 'gpt2-xl'?"),
        (lambda: GPT.named("bert"), "unknown model 'bert'; known: tiny, gpt2-small, "),
        (lambda: GPT(layers=0, hidden=4, heads=2), "layers must be an integer of at least 1, got 0"),
        (lambda: GPT(layers=1, hidden=10, heads=4), "hidden 10 does not divide into 4 heads: .* are 2 and 5"),
        (lambda: GPT(layers=1, hidden=4, heads=2, mlp_ratio=0), "mlp_ratio must be an integer of at least 1, got 0"),
        (lambda: SMALL.parameters_of([(3, 3)]), r"layers \(3, 3\) are not a part of 8 layers"),
        (lambda: SMALL.parameters_of([(0, 9)]), r"layers \(0, 9\) are not a part of 8 layers"),
        (lambda: Setup(tensor=0), "tensor must be an integer of at least 1, got 0"),
        (lambda: Setup(zero=4), "zero must be one of 0, 1, 2, 3; got 4"),
        (lambda: Setup(data=8, zero=2, reduce_once=True), "reduce_once is for zero=3, got zero=2"),
        (lambda: Setup(engine="fsdp"), "engine must be one of megatron, torchtitan, .*; got 'fsdp'"),
        (lambda: Setup(data=8, shard_ranks=4), "shard_ranks=4 divides nothing with zero=0: give zero 1, 2 or 3, too"),
        (
            lambda: Setup(data=8, zero=3, shard_ranks=3),
            "does not divide the 8 replicas: the nearest that work are 2 and 4",
        ),
        (lambda: Setup(checkpoint="some"), "checkpoint must be one of none, full, selective, op; got 'some'"),  # type: ignore[arg-type]  # so it is refused
        (lambda: Setup(sequence=0), "sequence must be an integer of at least 1, got 0"),
        (lambda: planned(setup=Setup(tensor=3)), "tensor=3 does not divide 4 heads and hidden 64: .* are 2 and 4"),
        (lambda: planned(setup=Setup(tensor=8)), "tensor=8 .* the nearest that works is 4"),
        (lambda: planned(setup=Setup(sequence=33)), "33 tokens is too long for a model with 32 positions"),
        (lambda: planned(setup=Setup(sequence=31, tensor=2, sequence_parallel=True)), "does not divide into 2 parts"),
        (lambda: planned(ranks=11), "8 layers cannot fill 11 stages on 11 ranks: .* at most 10 stages"),
        (lambda: stage_costs(SMALL, Placement.linear(1), Setup(), flops=0), "flops must be positive and finite"),
    ],
)
def test_what_cannot_be_is_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make()


@pytest.mark.parametrize("name", ["1f1b", "interleaved-1f1b", "zb-v", "dualpipe"])
def test_ranks_that_are_computed_once_hold_what_each_of_them_holds(name: str) -> None:
    """The bytes of a rank's plan without what its schedule keeps."""
    model, setup = GPT(layers=17, hidden=64, heads=4, positions=32, vocabulary=102), Setup(tensor=2, data=2, zero=1)
    schedule = make_schedule(name, ranks=4, microbatches=8)
    held, step = state_bytes(model, setup, schedule.placement, stage_layers(model, schedule.placement), 8)
    ranks = plan(model, schedule, setup).ranks
    alone = [replace(rank, activation_bytes=0.0) for rank in ranks]
    assert held == pytest.approx([replace(rank, step_bytes=0).peak_bytes for rank in alone])
    assert step == pytest.approx([rank.peak_bytes for rank in alone])
    assert len({*held}) > 1
