"""A configuration is read whole, and refused where it cannot work."""

from __future__ import annotations

import re
from dataclasses import FrozenInstanceError, fields
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeflow import UsageError
from pipeflow.optim import HalfPrecision
from pipeflow.training import Config, launch_from_config, read_config
from pipeflow.training.config import KEYS, UNREAD

TUTORIAL: dict[str, Any] = {
    "NUM_MICRO_BATCHES": 192,
    "parallel": {"pipeline": 2, "tensor": {"mode": "1d", "size": 2}, "context": 3, "experts": 4},
    "fp16": {"mode": "parameters", "initial_scale": 2**10},
    "clip_grad_norm": 1,
    "gradient_accumulation": 4,
    "TENSOR_SHAPE": (1, 1024, 1600),
    "BATCH_SIZE": 192,
    "model": {"type": "gpt", "num_chunks": 2},
    "seed": 3,
    "LOG_PATH": "logs",
}


def test_the_tutorials() -> None:
    config = read_config(TUTORIAL)
    assert (config.pipeline, config.tensor, config.context, config.experts) == (2, 2, 3, 4)
    assert (config.num_microbatches, config.num_chunks) == (192, 2)
    assert config.precision == HalfPrecision("parameters", torch.float16, {"initial_scale": 2**10})
    assert (config.clip_grad_norm, config.gradient_accumulation, config.seed) == (1.0, 4, 3)
    assert (config.tensor_shape, config.log_path) == ((1, 1024, 1600), "logs")
    assert (config.BATCH_SIZE, config.model.type, config.fp16.mode) == (192, "gpt", "parameters")
    assert config.parallel["tensor"]["size"] == config.parallel.tensor.size == 2
    assert getattr(config, "SEQ_LEN", None) is None
    assert read_config(config) is config
    with pytest.raises(FrozenInstanceError):
        config.tensor = 4  # type: ignore[misc]


def test_nothing_given() -> None:
    assert read_config({}) == Config()
    assert read_config({"NUM_CHUNKS": None, "TENSOR_SHAPE": None, "parallel": None, "fp16": None}).precision is None


@pytest.mark.parametrize(
    ("parallel", "expected"),
    [
        ({"pipeline": 4}, (4, 1)),
        ({"tensor": 2}, (1, 2)),
        ({"pipeline": {"size": 2}, "tensor": {"size": 4, "mode": "1d"}}, (2, 4)),
        ({"pipeline": 1, "tensor": {"size": 1, "mode": None}}, (1, 1)),
    ],
    ids=str,
)
def test_layouts(parallel: dict[str, Any], expected: tuple[int, int]) -> None:
    config = read_config({"parallel": parallel})
    assert (config.pipeline, config.tensor) == expected


def test_a_file(tmp_path: Path) -> None:
    file = tmp_path / "config.py"
    file.write_text(
        "import os\nfrom enum import Enum\n_HIDDEN = 4\nSEQ_LEN = 2 * _HIDDEN\n"
        "parallel = dict(pipeline=2)\nbf16 = dict(mode='autocast')\n",
        encoding="utf-8",
    )
    config = read_config(str(file))
    assert set(config.given) == {"SEQ_LEN", "parallel", "bf16"}
    assert (config.SEQ_LEN, config.pipeline) == (8, 2)
    assert config.precision is not None
    assert (config.precision.autocast, config.precision.parameters) == (torch.bfloat16, torch.float32)
    assert config.precision.scaler() is None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"parallel": {"pipelines": 2}}, "parallel has no key 'pipelines': did you mean 'pipeline'"),
        ({"parallel": {"tensor": {"sizes": 2}}}, "parallel.tensor has no key 'sizes': did you mean 'size'"),
        ({"fp16": {"mode": "parameters", "inital_scale": 2}}, "did you mean 'initial_scale'"),
        (
            {"parallel": {"tensor": {"mode": "4d", "size": 4}}},
            "tensor.mode must be one of '1d', '2d', '2.5d', '3d', got",
        ),
        ({"parallel": {"tensor": {"size": 2}}}, "parallel.tensor has a size and no mode: write .*mode='1d', size=2"),
        ({"parallel": {"pipeline": 0}}, "parallel.pipeline must be a positive whole number, got 0"),
        ({"parallel": {"context": 0}}, "parallel.context must be a positive whole number, got 0"),
        ({"parallel": 2}, "parallel must be a dict with the keys pipeline, tensor, context, experts, got 2"),
        ({"fp16": {"mode": "naive"}}, "must be 'parameters' or 'autocast', got 'naive'"),
        ({"fp16": {"initial_scale": 2}}, "must be 'parameters' or 'autocast', got None"),
        ({"fp16": {"mode": "parameters", "growth_factor": 0.5}}, "growth_factor 0.5"),
        ({"fp16": {"mode": "parameters"}, "bf16": {"mode": "parameters"}}, "both fp16 and bf16, with different values"),
        ({"NUM_CHUNKS": 2, "model": {"num_chunks": 3}}, "both NUM_CHUNKS and model.num_chunks, with different values"),
        ({"NUM_MICRO_BATCHES": True}, "NUM_MICRO_BATCHES must be a positive whole number"),
        ({"BATCH_SIZE": 1.5}, "BATCH_SIZE must be"),
        ({"TENSOR_SHAPE": (1, 0)}, "TENSOR_SHAPE must be a tuple"),
        ({"TENSOR_SHAPE": (2, None)}, "TENSOR_SHAPE must be a tuple"),
        ({"TENSOR_SHAPE": ()}, "TENSOR_SHAPE must be a tuple"),
        ({"NUM_EPOCHS": 0}, "NUM_EPOCHS must be a positive whole number"),
        ({"clip_grad_norm": -1}, "clip_grad_norm must be"),
        ({"gradient_accumulation": 0}, "gradient_accumulation must be"),
        ({"seed": "x"}, "seed must be"),
    ],
    ids=str,
)
def test_what_cannot_work_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        read_config(given)


@pytest.mark.parametrize("file", ["nowhere.py", "config.yaml"])
def test_what_is_no_file_is_refused(file: str, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("", encoding="utf-8")
    with pytest.raises(UsageError, match=r"a dict or a Python file; .* is not an existing \.py file"):
        read_config(tmp_path / file)


@pytest.mark.parametrize(
    ("slip", "meant"),
    [
        ("NUM_MICROBATCHES", "NUM_MICRO_BATCHES"),
        ("NUM_CHUNK", "NUM_CHUNKS"),
        ("BATCHSIZE", "BATCH_SIZE"),
        ("NUM_EPOCH", "NUM_EPOCHS"),
        ("SEED", "seed"),
        ("paralell", "parallel"),
        ("clip_grad_norms", "clip_grad_norm"),
        ("gradient_accumulation_steps", "gradient_accumulation"),
    ],
)
def test_a_slip_is_refused_with_the_nearest_key(slip: str, meant: str) -> None:
    with pytest.raises(UsageError, match=f"'{slip}' is not a known key: did you mean '{meant}'"):
        read_config({slip: 4})


def test_a_slip_inside_the_model_is_refused() -> None:
    with pytest.raises(UsageError, match=r"'model.num_chunk' is not a known key: did you mean 'model.num_chunks'"):
        read_config({"model": {"num_chunk": 2}})


def test_keys_of_the_users_own_stay() -> None:
    own = [
        "HIDDEN_SIZE",
        "SEQ_LENGTH",
        "IMG_SIZE",
        "PATCH_SIZE",
        "DEPTH",
        "NUM_HEADS",
        "MLP_RATIO",
        "NUM_CLASSES",
        "CHECKPOINT",
        "LEARNING_RATE",
        "WEIGHT_DECAY",
        "WARMUP_EPOCHS",
        "DROP_RATE",
        "TENSOR_PARALLEL_SIZE",
        "TENSOR_PARALLEL_MODE",
        "EVAL_BATCH_SIZE",
        "GLOBAL_BATCH_SIZE",
        "MAX_EPOCHS",
        "LOG_DIR",
        "DATA_PATH",
        "NUM_LAYERS",
    ]
    config = read_config({**dict.fromkeys(own, 1), "model": {"type": "gpt", "checkpoint": True}})
    assert set(config.given) == {*own, "model"}
    assert config.tensor_shape is None  # sizes do not make one
    assert read_config({"model": "gpt"}).model == "gpt"


def test_what_is_not_honoured_is_refused_by_name() -> None:
    for key in UNREAD:
        with pytest.raises(UsageError, match=f"'{key}' has no effect: {re.escape(UNREAD[key])}"):
            read_config({key: {}})


@pytest.mark.parametrize(("name", "told"), [("context", "context 2"), ("experts", "2 expert ranks do not divide")])
def test_context_and_expert_ranks_are_launched(name: str, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        launch_from_config({"parallel": {name: 2}})


EACH: dict[str, tuple[Any, Any]] = {
    "parallel.pipeline": (2, 2),
    "parallel.tensor": ({"mode": "1d", "size": 2}, 2),
    "parallel.tensor.mode": ("2d", "2d"),
    "parallel.tensor.depth": (2, 2),
    "parallel.context": (2, 2),
    "parallel.experts": (2, 2),
    "NUM_MICRO_BATCHES": (8, 8),
    "NUM_CHUNKS": (2, 2),
    "model.num_chunks": (3, 3),
    "TENSOR_SHAPE": ([None, 16, 8], (None, 16, 8)),
    "fp16": ({"mode": "autocast"}, HalfPrecision("autocast", torch.float16)),
    "bf16": ({"mode": "parameters"}, HalfPrecision("parameters", torch.bfloat16)),
    "clip_grad_norm": (2, 2.0),
    "gradient_accumulation": (4, 4),
    "BATCH_SIZE": (16, 16),
    "NUM_EPOCHS": (3, 3),
    "seed": (0, 0),
    "LOG_PATH": ("logs", "logs"),
    "dali.mixup_alpha": (0.2, 0.2),
    "dali.gpu_aug": (True, True),
}


def test_every_key_is_here() -> None:
    assert set(EACH) == set(KEYS)
    assert {attribute for attribute, _ in KEYS.values()} == {each.name for each in fields(Config)} - {"given"}


@pytest.mark.parametrize("key", EACH)
def test_each_key_becomes_its_attribute(key: str) -> None:
    """And is the one that does: without it the attribute is another."""
    given, expected = EACH[key]
    for name in reversed(key.split(".")):
        given = {name: given}
    config = read_config(given)
    assert getattr(config, KEYS[key][0]) == expected
    assert getattr(Config(), KEYS[key][0]) != expected
