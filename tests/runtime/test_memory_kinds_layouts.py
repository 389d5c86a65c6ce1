"""Recomputed and offloaded microbatches have the same gradients, bit by bit: with dropout, on tensor ranks, and in a
Trainer.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pipeflow import Pipeline, execute_pipeline, make_schedule
from pipeflow.engine.parallel.context import current_context
from pipeflow.tensor import manual_seed
from pipeflow.testing import run_processes, run_threads
from pipeflow.training.models import GPTLMLoss, build_gpt_pipeline
from tests.huggingface import trainers
from tests.runtime import kinds
from tests.runtime.kinds import Gradients, differing, gradients_of, uses_of
from tests.runtime.work import largest, variants

MICROBATCHES = 4


# Dropout


def dropping(stages: int) -> nn.Sequential:
    """Blocks that drop out, some of them in a checkpoint of their own."""
    torch.manual_seed(0)
    blocks = [
        nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.3), nn.Linear(16, 8), nn.LayerNorm(8), nn.Dropout(0.2))
        for _ in range(stages)
    ]
    return nn.Sequential(*blocks)


def dropout_differs(names: list[str], uses: tuple[str, ...]) -> list[str]:
    """Of every schedule and use: where gradients differ."""
    wrong = []
    ranks = current_context().pipeline_size
    batch = torch.randn(8, 8, generator=torch.Generator().manual_seed(1)), torch.ones(8, 8)
    for name in names:
        plain = make_schedule(name, ranks=ranks, microbatches=MICROBATCHES)
        module = dropping(plain.placement.num_stages)
        model = Pipeline.from_module(module, plain, batch, criterion=nn.functional.mse_loss)
        expected: Gradients = {}
        for schedule in uses_of(plain, uses):
            torch.manual_seed(7)
            model.zero_grad()
            execute_pipeline(iter([batch]), model, schedule=schedule)
            expected = expected or gradients_of(model)
            wrong += differing(schedule, gradients_of(model), expected)
    return wrong


@pytest.mark.slow
@pytest.mark.parametrize(
    ("names", "uses"),
    [
        (["1f1b", "zb-v"], kinds.ALL),
        pytest.param([name for name, ranks, _ in largest(variants())], kinds.ALL, marks=pytest.mark.exhaustive),
    ],
    ids=["some", "all"],
)
def test_dropout_draws_the_same_numbers(names: list[str], uses: tuple[str, ...]) -> None:
    assert run_processes(dropout_differs, 4, names, uses, deadline=300.0) == [[]] * 4


# Tensor ranks

WORDS = torch.randint(32, (8, 9), generator=torch.Generator().manual_seed(1))
SIZES: dict[str, Any] = {
    "hidden_size": 16,
    "num_attention_heads": 2,
    "vocab_size": 32,
    "max_position_embeddings": 8,
    "drop_rate": 0.5,
    "seed": 1,
}


def tensor_differs(name: str, options: dict[str, Any]) -> list[str]:
    plain = make_schedule(name, ranks=current_context().pipeline_size, microbatches=MICROBATCHES)
    stages = build_gpt_pipeline(plain.placement.num_stages, placement=plain.placement, **SIZES, **options)
    model = Pipeline(stages, plain, criterion=GPTLMLoss())
    expected: Gradients = {}
    wrong = []
    for schedule in uses_of(plain, kinds.ALL):
        manual_seed(7)
        model.zero_grad()
        execute_pipeline(iter([({"input_ids": WORDS[:, :-1]}, WORDS[:, 1:])]), model, schedule=schedule)
        expected = expected or gradients_of(model)
        wrong += differing(schedule, gradients_of(model), expected)
    return wrong


NAMES = [name for name, _, _ in largest(variants())]
OPTIONS: list[dict[str, Any]] = [{}, {"sequence_parallel": True}, {"checkpoint": True}]


@pytest.mark.some(1)
@pytest.mark.parametrize(("name", "options"), [*product(NAMES, OPTIONS)], ids=str)
def test_tensor_ranks(name: str, options: dict[str, Any]) -> None:
    assert run_threads(tensor_differs, 8, name, options, tensor=2) == [[]] * 8


# Trainers


def trained(use: str | None) -> list[float]:
    """The losses that a Trainer of transformers logs."""
    trainer = trainers.make_trainer("llama", Path("/nowhere"), model=None if use is None else using(use), max_steps=3)
    trainer.train()
    return [each["loss"] for each in trainer.state.log_history if "loss" in each]


def using(use: str) -> Pipeline:
    model = trainers.make_pipeline("llama")
    model.schedule = kinds.with_kinds(model.schedule, use)
    return model


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore")
def test_a_trainer_of_transformers_takes_such_a_schedule() -> None:
    pytest.importorskip("transformers", reason="not installed", exc_type=ImportError)
    expected = run_threads(trained, 2, None)
    assert run_threads(trained, 2, kinds.MIXED) == expected
    assert len(expected[0]) == 3
