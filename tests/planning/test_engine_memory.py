"""What engines keep on a device beside the tensors that all need, from examples that are computed by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pipeflow import GPT, PRECISIONS, Setup, make_schedule, plan
from pipeflow.planning.cluster import Cluster
from pipeflow.planning.engines import COMMUNICATOR, CONTEXT
from pipeflow.planning.rank_memory import ALLOCATOR, RankPlan
from pipeflow.planning.step_plan import Plan

SMALL = GPT(layers=8, hidden=1024, heads=16, vocabulary=50304)
TOKENS = 1024  # of a microbatch


def planned(ranks: int = 4, precision: str = "bf16", **options: Any) -> Plan:
    setup = Setup(precision=PRECISIONS[precision], **options)
    return plan(SMALL, make_schedule("1f1b", ranks=ranks, microbatches=8), setup, cluster=Cluster.of("a100-80gb"))


def first(**options: Any) -> RankPlan:
    return planned(**options).ranks[0]


@pytest.mark.parametrize(
    ("engine", "options", "width"),
    [
        (None, {"precision": "bf16-mixed", "zero": 1}, 4),
        ("megatron", {"precision": "bf16-mixed", "zero": 1}, 4),
        ("deepspeed", {"precision": "bf16-mixed", "zero": 1}, 4 + 2),
        ("deepspeed", {"precision": "bf16", "zero": 1}, 2),
        ("torchtitan", {"precision": "bf16", "zero": 1}, 4),
        ("torchtitan", {"precision": "bf16", "zero": 0}, 2),
    ],
)
def test_gradients_have_the_bytes_that_the_engine_keeps(
    engine: str | None, options: dict[str, Any], width: int
) -> None:
    rank = first(engine=engine, data=8, **options)
    assert rank.gradient_bytes == width * rank.parameters


def test_an_engine_that_divides_gradients_keeps_no_second_ones() -> None:
    """In DeepSpeed, gradients of 16 bits are whole only without ZeRO-2."""
    rank = first(ranks=1, engine="deepspeed", precision="bf16-mixed", zero=2, data=8)
    assert rank.gradient_bytes == pytest.approx(4 * rank.parameters / 8, rel=1e-6)


def test_a_stage_keeps_its_output_where_the_engine_does() -> None:
    """The first of 4 ranks has 4 microbatches on their way, each with an output of 1024 x 1024 numbers in bf16."""
    kept, freed = (first(engine=engine).activation_bytes for engine in ("deepspeed", "megatron"))
    assert kept - freed == 4 * TOKENS * 1024 * 2


def test_linears_keep_gathered_inputs_where_the_engine_does() -> None:
    """Of 2 tensor ranks, each keeps 1024 numbers per token, not 512, before two linears of each of its 2 layers."""
    of: dict[str, Any] = {"ranks": 4, "tensor": 2, "sequence_parallel": True}
    kept, parts = (planned(**of, engine=engine).cost.saved_bytes[1] for engine in ("torchtitan", "megatron"))
    assert kept - parts == 2 * 2 * TOKENS * 512 * 2  # its output, too, but its input is in a buffer


def test_a_buffer_of_reductions_has_at_most_the_numbers_of_the_rank_and_is_there_twice_with_overlap() -> None:
    rank = first(engine="deepspeed", zero=1, data=8)
    assert rank.buffer_bytes == 2 * rank.parameters
    assert first(engine="deepspeed", zero=1, data=8, overlap=True).buffer_bytes == 4 * rank.parameters
    assert first(engine="deepspeed", zero=1, data=8, precision="bf16-mixed").buffer_bytes == 0
    assert first(engine="deepspeed", data=8).buffer_bytes == first(zero=1, data=8).buffer_bytes == 0


def test_the_loss_has_copies_of_the_logits() -> None:
    """Over tensor ranks, torch's has four bytes more. 16-bit logits are among those that a pipeline keeps."""
    for tensor, copies in ((1, 10), (2, 14)):
        split: dict[str, Any] = {"engine": "torchtitan", "tensor": tensor, "sequence_parallel": tensor > 1}
        one, several = planned(1, **split), planned(**split)
        logits = TOKENS * SMALL.vocabulary // tensor
        assert one.ranks[-1].recomputed_bytes == copies * logits
        assert several.ranks[-1].recomputed_bytes == (copies - 2) * logits
        assert one.ranks[-1].backward_bytes == several.ranks[0].recomputed_bytes == 0
    compiled = planned(1, engine="torchtitan-compiled").ranks[0]
    assert (compiled.recomputed_bytes, compiled.backward_bytes) == (0, planned(1).ranks[0].backward_bytes)


def test_a_layer_has_gradients_of_its_widest_values_in_its_backward() -> None:
    """Those of its output, and of its wide linear's output: 1024 and 4096 numbers; with tensor ranks 1024 and 2048."""
    assert first().backward_bytes == 2 * TOKENS * (1024 + 4096)
    assert first(tensor=2).backward_bytes == 2 * TOKENS * (1024 + 2048)
    assert planned().ranks[-1].backward_bytes == 2 * TOKENS * (1024 + 4096)


def test_an_engine_has_a_buffer_for_each_microbatch_and_keeps_all_logits() -> None:
    """Of 8 microbatches, the second of 4 ranks receives activations and gradients, the last one activations."""
    one = TOKENS * 1024 * 2
    ranks, plain = planned(engine="torchtitan").ranks, planned().ranks
    assert [rank.transfer_bytes for rank in plain] == [one, 2 * one, 2 * one, one]
    assert [rank.transfer_bytes for rank in ranks[:3]] == [8 * one, 16 * one, 16 * one]
    assert ranks[3].transfer_bytes == 8 * one + 8 * 2 * TOKENS * SMALL.vocabulary


def test_shards_of_fsdp_are_float32() -> None:
    """16 bytes a parameter: a master weight, two moments, and a gradient."""
    for precision in ("bf16", "bf16-mixed"):
        rank = first(ranks=1, engine="torchtitan", zero=3, data=8, precision=precision)
        held = rank.weight_bytes + rank.gradient_bytes + rank.optimizer_bytes
        assert held == 16 * -(-rank.parameters // 8)


def test_gradients_of_a_stage_are_whole_from_its_first_backward_to_its_last() -> None:
    """Interleaved, all backwards of a rank's second stage precede those of its first. With 1F1B all are there."""
    setup = Setup(data=8, zero=3, engine="torchtitan", precision=PRECISIONS["bf16"])
    one = plan(SMALL, make_schedule("1f1b", ranks=4, microbatches=4), setup, cluster=Cluster.of("a100-80gb"))
    schedule = make_schedule("interleaved-1f1b", ranks=4, microbatches=4, chunks=2)
    two = plan(SMALL, schedule, setup, cluster=Cluster.of("a100-80gb"))
    for found, stages in ((one, 1), (two, 2)):
        rank = found.ranks[1]  # two layers, in as many stages
        assert rank.gradient_bytes == 4 * rank.parameters / stages + 4 * -(-rank.parameters // 8)
    assert plan(SMALL, schedule, setup, microbatch_factors=(1, 1, 1, 1)).ranks[1].gradient_bytes > 4 * rank.parameters


def test_tensor_ranks_have_gradients_for_all_words() -> None:
    split: dict[str, Any] = {"data": 8, "zero": 3, "engine": "torchtitan", "tensor": 2, "sequence_parallel": True}
    ranks = planned(**split).ranks
    others = 4 * SMALL.vocabulary // 2 * 1024
    assert ranks[0].gradient_bytes == 4 * ranks[0].parameters + others + 4 * -(-ranks[0].parameters // 8)
    assert ranks[1].gradient_bytes == 4 * ranks[1].parameters + 4 * -(-ranks[1].parameters // 8)


def test_the_step_of_the_optimizer_has_float32_gradients_when_activations_are_gone() -> None:
    """A divided copy of 4 bytes per parameter adds only what is above the activations."""
    rank = first(data=8, zero=1)
    assert rank.step_bytes == 4 * -(-rank.parameters // 8)
    assert rank.peak_parts["step"] == 0
    whole = first(microbatch_size=1, checkpoint="full")
    beside = whole.activation_bytes + whole.recomputed_bytes + whole.backward_bytes + whole.transfer_bytes
    state = whole.weight_bytes + whole.gradient_bytes + whole.optimizer_bytes
    assert whole.step_bytes == 4 * whole.parameters > beside
    assert whole.peak_parts["step"] == whole.step_bytes - beside
    assert whole.peak_bytes == pytest.approx((1 + ALLOCATOR) * (state + whole.step_bytes))
    assert sum(whole.peak_parts.values()) == pytest.approx(whole.peak_bytes)
    assert first(precision="bf16-mixed").step_bytes == first(precision="float32").step_bytes == 0


def test_each_kind_of_group_has_a_communicator() -> None:
    assert planned(ranks=1).outside_bytes == CONTEXT
    found = planned(tensor=2, data=8)
    assert found.outside_bytes == CONTEXT + 3 * COMMUNICATOR
    least = 1.008 / (1 + ALLOCATOR) * found.peak_bytes  # the allocator gives back what it does not use
    assert found.device_bytes == pytest.approx(least + found.outside_bytes)


def test_a_layout_fits_only_with_its_context() -> None:
    """On a device whose memory, but for 1.5 %, is what the tensors take, the context does not fit."""
    found, schedule = planned(), make_schedule("1f1b", ranks=4, microbatches=8)
    for room, fits in ((found.device_bytes - found.outside_bytes, False), (found.device_bytes * (1 + 1e-9), True)):
        known = Cluster.of("a100-80gb")
        tight = replace(known, device=replace(known.device, memory_bytes=room / 0.985))
        assert plan(SMALL, schedule, Setup(), cluster=tight).fits is fits
