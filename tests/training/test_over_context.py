"""Training over context ranks is training in one process: losses, norms, every gradient, every weight."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy
import pytest

from pipeflow import execute_pipeline
from pipeflow.engine.parallel.context import CONTEXT_ATTENTION
from pipeflow.testing import run_processes, run_threads
from tests.training.hybrid import Trained, require_trained
from tests.training.over_context import Gpt, pipeline_of, train, train_in_one_process

TOLERANCE = 1e-12
SAMPLES = {1: (3,), 2: (3, 5)}
LAYOUTS = [
    pytest.param(
        (context, pipeline, tensor, data),
        id=f"{data}x{pipeline}x{context}x{tensor}",
        marks=[] if (context, pipeline, tensor, data) == (2, 2, 1, 2) else [pytest.mark.exhaustive],
    )
    for context in (2, 4)
    for pipeline in (1, 2)
    for tensor in (1, 2)
    for data in (1, 2)
]
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "recomputed": {"checkpoint": True},
    "zero": {"zero": True},
    "given positions": {"gives_positions": True, "sequence_parallel": True},
    "all to all": {"context_attention": "all_to_all", "checkpoint": True, "zero": True},
    "ring": {"context_attention": "ring", "checkpoint": True, "zero": True},
    "slices": {"slices": 2, "gives_positions": True, "sequence_parallel": True},
    "slices in a ring": {"slices": 2, "context_attention": "ring", "checkpoint": True, "zero": True},
}


@cache
def expected(samples: tuple[int, ...], gives_positions: bool = False) -> Trained:
    return train_in_one_process(Gpt(samples=samples, gives_positions=gives_positions))


def run(runner: Any, work: Gpt, context: int, tensor: int = 1) -> None:
    data = len(work.samples)
    ranks = context * work.pipeline * tensor * data
    sizes: dict[str, Any] = {"context": context, "tensor": tensor, "data": data}
    results = runner(train, ranks, work, **sizes, context_attention=work.context_attention)
    require_trained(results, expected(work.samples, work.gives_positions), TOLERANCE)


@pytest.mark.slow
@pytest.mark.some(2)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["1f1b", "zb-v", "interleaved-1f1b"])
@pytest.mark.parametrize("kind", KINDS)
def test_threads(kind: str, name: str, layout: tuple[int, int, int, int]) -> None:
    context, pipeline, tensor, data = layout
    if context * tensor == 8 and (kind == "all to all" or "slices" in KINDS[kind]):
        pytest.skip("eight ranks have neither a head each nor twice two tokens of each of two slices")
    run(run_threads, Gpt(name, pipeline, SAMPLES[data], **KINDS[kind]), context, tensor)


def test_one_stage() -> None:
    run(run_threads, Gpt(), 2)


@pytest.mark.parametrize("how", ["ring", "all_to_all"])
def test_one_stage_with_keys_of_one_rank_at_a_time_or_of_some_heads(how: str) -> None:
    run(run_threads, Gpt(context_attention=how), 4)


@pytest.mark.parametrize("how", CONTEXT_ATTENTION)
def test_slices(how: str) -> None:
    """Each of three slices, of 4, 8 and 4 tokens, is divided over both ranks."""
    run(run_threads, Gpt("zb-v", 2, slices=3, context_attention=how), 2)


DROPPING: dict[str, dict[str, Any]] = {
    "plain": {},
    "recomputed": {"checkpoint": True, "zero": True, "samples": (3, 5)},
    "slices": {"name": "zb-v", "pipeline": 2, "slices": 2},
}


@pytest.mark.slow
@pytest.mark.some(3)
@pytest.mark.parametrize("how", ["gather", "all_to_all"])
@pytest.mark.parametrize("kind", DROPPING)
def test_dropout_is_that_of_one_context_rank(kind: str, how: str) -> None:
    """Of embeddings, attention, and the outputs of both, with the same microbatches: masks are those of sequences."""
    work = Gpt(dropout=0.3, context_attention=how, **DROPPING[kind])
    sizes: dict[str, Any] = {"data": len(work.samples)}
    alone = run_threads(train, work.pipeline * len(work.samples), work, **sizes)
    over = run_threads(train, 2 * work.pipeline * len(work.samples), work, context=2, **sizes, context_attention=how)
    plain = run_threads(train, work.pipeline * len(work.samples), replace(work, dropout=0.0), **sizes)
    assert losses_of(alone) == pytest.approx(losses_of(over), rel=TOLERANCE)
    assert losses_of(alone) != pytest.approx(losses_of(plain), rel=0.01)
    gradients = {name: each for rank in alone for name, (_, each) in rank.gradients.items()}
    assert len(gradients) > 40
    for rank in over:
        for name, (_, each) in rank.gradients.items():
            numpy.testing.assert_allclose(each, gradients[name], rtol=0, atol=TOLERANCE, err_msg=name)


def losses_of(ranks: list[Trained]) -> list[float]:
    return [loss for rank in ranks for loss in rank.losses if loss is not None][:3]


@pytest.mark.slow
@pytest.mark.parametrize("how", CONTEXT_ATTENTION)
def test_gloo(how: str) -> None:
    run(run_processes, Gpt("zb-v", 2, zero=True, checkpoint=True, context_attention=how), 2)


@pytest.mark.exhaustive
def test_copies_of_a_stage() -> None:
    run(run_threads, Gpt("dualpipe", 2, samples=(5,), microbatches=4), 2)


def evaluate(work: Gpt) -> tuple[float, int, float]:
    output = execute_pipeline(iter([work.batch(0, 0)]), pipeline_of(work), forward_only=True)
    assert output.loss is not None
    return output.loss.item(), output.samples, output.weight


def test_an_evaluation_has_the_loss_of_all_tokens() -> None:
    """Each sample counts once, and each label once."""
    work = Gpt()
    labels = work.batch(0, 0)[1][:, 1:]
    loss = pytest.approx(expected(work.samples).losses[0], abs=TOLERANCE)
    assert run_threads(evaluate, 2, work, context=2) == [(loss, 3, int((labels != -100).sum()))] * 2


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(2, 1), (1, 2)], ids=["to one", "from one"])
def test_a_checkpoint_goes_on_under_another_number_of_context_ranks(tmp_path: Path, sizes: tuple[int, int]) -> None:
    work, whole = Gpt("1f1b", 2), expected(SAMPLES[1])
    before, after = sizes
    run_threads(train, 2 * before, replace(work, steps=2), str(tmp_path / "checkpoint"), context=before)
    results = run_threads(train, 2 * after, work, str(tmp_path / "checkpoint"), 2, context=after)
    require_trained(results, replace(whole, losses=whole.losses[2:], norms=whole.norms[2:]), TOLERANCE)
