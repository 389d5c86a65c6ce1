"""Attention's time by kernel, sequence, head and device, beside the figures of its papers."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest

from pipeflow import GPT, Cluster, Setup
from pipeflow.core.errors import UsageError
from pipeflow.planning.attention import KERNELS, Kernel, Scores, fused_shares
from pipeflow.planning.device import DEVICES
from pipeflow.planning.efficiency import PUBLISHED
from pipeflow.planning.physical import rates_of
from pipeflow.planning.rates import Rates
from pipeflow.planning.setup import PRECISIONS
from pipeflow.planning.work import DeviceWork, layer_work

A100, H100 = Cluster.of("a100-80gb"), Cluster.of("h100-80gb")


def reached(cluster: Cluster, scores: Scores) -> float:
    """TFLOP/s of a forward and a backward together, as FlashAttention's benchmarks count."""
    work = DeviceWork((), attention_flops=1e15, again_flops=0.5e15, scores=scores)
    seconds = Rates(cluster, replace(PUBLISHED, fused=1.0), "bf16").seconds(work)
    return 3.5e15 / (seconds.forward + seconds.backward) / 1e12


@pytest.mark.parametrize(
    ("kernel", "tokens", "head", "published"),
    [
        ("flash2", 512, 64, 88),  # arXiv 2307.08691, figure 4
        ("flash2", 2048, 64, 140),
        ("flash2", 16384, 64, 171),
        ("flash2", 512, 128, 99),
        ("flash2", 16384, 128, 189),
        ("flash1", 16384, 64, 97),
    ],
)
def test_kernels_on_a100_reach_what_their_paper_measured(
    kernel: Kernel, tokens: int, head: int, published: float
) -> None:
    assert reached(A100, Scores(kernel, tokens, head, is_causal=True)) == pytest.approx(published, rel=0.1)


def test_h100_needs_kernels_of_its_own() -> None:
    """335 TFLOP/s of flash2 (arXiv 2307.08691, section 4.1), and flash3's gain (arXiv 2407.08608)."""
    slow, fast = (reached(H100, Scores(kernel, 16384, 128, is_causal=True)) for kernel in ("flash2", "flash3"))
    assert slow == pytest.approx(335, rel=0.08)
    assert 1.5 < fast / slow < 1.75
    assert reached(A100, Scores("flash3", 16384, 128, True)) == reached(A100, Scores("flash2", 16384, 128, True))


def test_training_reaches_nearly_what_papers_measured() -> None:
    assert 0.9 < PUBLISHED.fused <= 1


def test_attention_is_no_faster_than_products_on_any_device() -> None:
    for name in DEVICES:
        cluster, precision = Cluster.of(name), "bf16" if "bf16" in DEVICES[name].flops else "fp16"
        rates = rates_of(cluster, Setup(precision=PRECISIONS[precision], attention="flash3"))
        assert max(rates.attention(Scores("flash3", 1e6, 128, True))) < rates.peak * rates.efficiency.products, name


def test_heads_that_are_no_multiple_of_32_are_filled_up() -> None:
    shares = {head: fused_shares(Scores("flash2", 4096, head, True), "a100").forward for head in (80, 96, 128)}
    assert shares[80] == pytest.approx(shares[96] * 80 / 96)
    assert shares[96] < shares[128]


def test_attention_without_a_fused_kernel_is_products_as_short_as_a_head() -> None:
    rates = Rates(A100, PUBLISHED, "fp16")
    speeds = {head: rates.attention(Scores("unfused", 2048, head, True))[0] for head in (64, 80, 84, 128)}
    assert speeds[64] < speeds[80] < speeds[128]
    assert speeds[84] < speeds[64]  # its rows do not start at multiples of 16 bytes
    assert speeds[128] == pytest.approx(rates.peak * PUBLISHED.products / (1 + PUBLISHED.depth / 128), rel=0.15)


def test_longer_sequences_take_more_than_their_share_with_any_kernel() -> None:
    model = GPT(2, 1024, 8, positions=65536)
    for kernel in KERNELS:
        works = [layer_work(model, Setup(sequence=tokens, attention=kernel)) for tokens in (16384, 32768)]
        short, long = (Rates(A100, PUBLISHED, "bf16").seconds(each._replace(products=())).scores for each in works)
        assert 3.8 < long / short < 4.1


def test_a_measured_share_of_attention_holds_for_every_shape() -> None:
    rates = Rates(H100, replace(PUBLISHED, attention=0.25), "bf16")
    found = {rates.attention(Scores(kernel, 512, 40, True)) for kernel in KERNELS} | {rates.attention(None)}
    assert found == {(0.25 * rates.peak, 0.25 * rates.peak)}
    unknown, usual = rates_of_long(None), rates_of_long(Scores("flash2", math.inf, 128, True))
    assert unknown == usual


def rates_of_long(scores: Scores | None) -> tuple[float, float]:
    return Rates(A100, PUBLISHED, "bf16").attention(scores)


def test_all_layouts_of_a_program_on_a_device_have_the_same_kernel() -> None:
    sizes = [*itertools.product((1, 2), (1, 8), (1, 2), (0, 1, 3), ("none", "full"), ("bf16", "bf16-mixed"))]
    for engine, cluster, kernel in (
        (None, A100, "flash2"),
        (None, Cluster.of("l40s"), "flash2"),
        (None, H100, "flash3"),
        ("megatron", H100, "flash3"),
        ("torchtitan", H100, "flash2"),
    ):
        for tensor, data, context, zero, checkpoint, precision in sizes:
            setup = Setup(
                tensor=tensor,
                data=data,
                context=context,
                zero=zero,
                checkpoint=checkpoint,  # type: ignore[arg-type]  # one of them
                precision=PRECISIONS[precision],
                engine=engine,
            )
            given = replace(setup, attention=kernel)  # type: ignore[arg-type]  # one of them
            rates, model = rates_of(cluster, setup), GPT(4, 512, 4, 512, 8192)
            assert rates.seconds(layer_work(model, setup)) == rates.seconds(layer_work(model, given))


def test_the_kernel_follows_from_the_program_unless_it_is_given() -> None:
    assert Setup(keep_scores=True).kernel == Setup(precision=PRECISIONS["fp16"]).kernel == "unfused"
    assert Setup(data=8, zero=3, engine="torchtitan").kernel == "flash2"
    given = Setup(precision=PRECISIONS["fp16"], attention="flash1")
    assert (given.kernel, given.stores_scores) == ("flash1", False)
    assert Setup(attention="unfused").stores_scores
    with pytest.raises(UsageError, match="attention must be one of unfused, flash1, flash2, flash3; got 'flash9'"):
        Setup(attention="flash9")  # type: ignore[arg-type]  # that is the point
    for wrong in ({"keep_scores": True}, {"checkpoint": "selective"}):
        with pytest.raises(UsageError, match="stores its scores, and flash2 does not"):
            Setup(attention="flash2", **wrong)


def test_documents_of_a_packed_sequence_see_themselves_alone() -> None:
    """16 documents of 256 tokens have the attention of 16 sequences of 256 tokens, and everything else of one of 4096.
    Where scores are stored, all of them are.
    """
    model = GPT(layers=1, hidden=1024, heads=8, positions=4096, window=1024)
    packed, whole = (layer_work(model, Setup(sequence=4096, document=each)) for each in (256, None))
    apart = layer_work(model, Setup(sequence=256, microbatch_size=16))
    assert (packed.attention_flops, packed.scores) == (apart.attention_flops, apart.scores)
    assert (packed.products, packed.moved_bytes) == (whole.products, whole.moved_bytes)
    assert layer_work(model, Setup(sequence=4096, document=8192)) == whole
    stored = [layer_work(model, Setup(keep_scores=True, document=each)).attention_flops for each in (256, None)]
    assert stored[0] == stored[1]
    with pytest.raises(UsageError, match="document must be"):
        Setup(document=0)
