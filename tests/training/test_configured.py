"""make_engine does what the configuration says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeflow import PipelineError, UsageError
from pipeflow.engine.parallel.context import current_context
from pipeflow.testing import run_threads
from pipeflow.testing.models import PlainModel
from pipeflow.training import Engine, make_engine
from pipeflow.training.config import read_config
from pipeflow.training.launch import keep_config


def engine_for(config: dict[str, Any], chunks: int | None = None, dtype: torch.dtype = torch.float32) -> Engine:
    """One for a model of 4 layers in so many chunks a rank."""
    context, model = current_context(), PlainModel(dtype=dtype)
    count = chunks or 1
    cut = model.cut(context.pipeline_size * count)[context.pipeline_rank :: context.pipeline_size]
    parts = [model.stage(*each) for each in cut]
    module = parts[0] if chunks is None else nn.ModuleList(parts)
    keep_config(read_config(config))
    return make_engine(module, torch.optim.SGD(module.parameters(), lr=0.1), model.criterion)


def described(config: dict[str, Any], chunks: int | None = None) -> dict[str, Any]:
    """What the engine is like, and the loss of a step."""
    engine = engine_for(config, chunks)
    inputs, labels = PlainModel(dtype=torch.float32).batch(4)
    step = engine.train_step(iter([(inputs, labels)] * engine.gradient_accumulation))
    weight = next(engine.model.parameters())
    return {
        "schedule": engine.model.schedule.name,
        "microbatches": engine.model.schedule.num_microbatches,
        "clips": step.grad_norm is not None,
        "accumulated": len(step.batches),
        "loss": float(step.loss),
        "dtype": weight.dtype,
        "optimizer": type(engine.optimizer).__name__,
    }


def test_the_keys() -> None:
    plain = {"parallel": {"pipeline": 2}, "NUM_MICRO_BATCHES": 4}
    [first, *_] = run_threads(described, 2, plain)
    assert first == {
        "schedule": "1f1b",
        "microbatches": 4,
        "clips": False,
        "accumulated": 1,
        "loss": first["loss"],
        "dtype": torch.float32,
        "optimizer": "SGD",
    }
    [more, *_] = run_threads(described, 2, {**plain, "clip_grad_norm": 1.0, "gradient_accumulation": 3})
    assert more == {**first, "clips": True, "accumulated": 3, "loss": pytest.approx(first["loss"])}
    [chunked, *_] = run_threads(described, 2, {**plain, "NUM_CHUNKS": 2}, 2)
    assert chunked == {**first, "schedule": "interleaved-1f1b", "loss": pytest.approx(first["loss"])}
    assert run_threads(described, 2, {**plain, "NUM_CHUNKS": 1}, 1)[0] == first
    shape = {"TENSOR_SHAPE": (1, 3, 6)}
    assert run_threads(described, 2, {**plain, **shape})[0] == first


@pytest.mark.parametrize("section", ["fp16", "bf16"])
@pytest.mark.parametrize("mode", ["parameters", "autocast"])
def test_16_bits(section: str, mode: str) -> None:
    plain = {"parallel": {"pipeline": 2}, "NUM_MICRO_BATCHES": 4}
    [exact, *_] = run_threads(described, 2, plain)
    [half, *_] = run_threads(described, 2, {**plain, section: {"mode": mode}, "TENSOR_SHAPE": (1, 3, 6)})
    narrow = torch.float16 if section == "fp16" else torch.bfloat16
    assert half["dtype"] == (narrow if mode == "parameters" else torch.float32)
    assert half["optimizer"] == "MasterWeights"
    assert half["loss"] == pytest.approx(exact["loss"], rel=0.02)
    assert half["loss"] != exact["loss"]


def seen_by(section: dict[str, Any]) -> list[torch.dtype]:
    """What the criterion of a model in 16 bits is given."""
    seen: list[torch.dtype] = []

    def criterion(output: Tensor, labels: Tensor) -> Tensor:
        seen.append(output.dtype)
        return (output - labels).square().mean()

    keep_config(read_config(section))
    module = PlainModel(dtype=torch.float32).stage(0, 4)
    engine = make_engine(module, torch.optim.SGD(module.parameters(), lr=0.1), criterion)
    engine.train_step(iter([PlainModel(dtype=torch.float32).batch(4)]))
    return seen


def test_a_loss_is_computed_in_float32() -> None:
    assert run_threads(seen_by, 1, {"bf16": {"mode": "parameters"}}) == [[torch.float32]]


def refused(config: dict[str, Any], chunks: int | None) -> str:
    with pytest.raises((UsageError, PipelineError)) as raised:
        engine_for(config, chunks)
    return str(raised.value)


@pytest.mark.parametrize(
    ("config", "chunks", "part"),
    [
        ({}, None, "lacks NUM_MICRO_BATCHES"),
        ({"NUM_MICRO_BATCHES": 4, "NUM_CHUNKS": 2}, None, "NUM_CHUNKS is 2, but the model has 1"),
        ({"NUM_MICRO_BATCHES": 4, "NUM_CHUNKS": 1}, 2, "NUM_CHUNKS is 1, but the model has 2"),
    ],
    ids=["microbatches", "too few chunks", "too many chunks"],
)
def test_what_cannot_work_is_refused(config: dict[str, Any], chunks: int | None, part: str) -> None:
    for message in run_threads(refused, 2, config, chunks):
        assert part in message
