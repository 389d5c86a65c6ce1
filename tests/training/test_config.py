"""A configuration is read whole, and refused where it cannot work."""

from __future__ import annotations

import logging
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeflow import UsageError
from pipeflow.optim import HalfPrecision
from pipeflow.training import Config, read_config

TUTORIAL: dict[str, Any] = {
    "NUM_MICRO_BATCHES": 192,
    "parallel": {"pipeline": 2, "tensor": {"mode": "1d", "size": 2}},
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
    assert (config.pipeline, config.tensor, config.num_microbatches, config.num_chunks) == (2, 2, 192, 2)
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
        "parallel = dict(pipeline=2)\nbf16 = dict(mode='autocast')\n"
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
        ({"parallel": {"tensor": {"sizes": 2}}}, "tensor has no key 'sizes': did you mean 'size'"),
        ({"fp16": {"mode": "parameters", "inital_scale": 2}}, "did you mean 'initial_scale'"),
        ({"parallel": {"tensor": {"mode": "2d", "size": 4}}}, "mode '2d' does not exist here.*mode='1d', size=4"),
        ({"parallel": {"tensor": {"size": 2}}}, "mode None does not exist here"),
        ({"parallel": {"pipeline": 0}}, "parallel.pipeline must be a positive whole number, got 0"),
        ({"parallel": 2}, "parallel must be a dict of pipeline, tensor, got 2"),
        ({"fp16": {"mode": "naive"}}, "takes mode 'parameters' or 'autocast', got 'naive'"),
        ({"fp16": {"initial_scale": 2}}, "takes mode 'parameters' or 'autocast', got None"),
        ({"fp16": {"mode": "parameters", "growth_factor": 0.5}}, "growth_factor 0.5"),
        ({"fp16": {"mode": "parameters"}, "bf16": {"mode": "parameters"}}, "both fp16 and bf16"),
        ({"NUM_CHUNKS": 2, "model": {"num_chunks": 3}}, "NUM_CHUNKS is 2 and model.num_chunks 3"),
        ({"NUM_MICRO_BATCHES": True}, "NUM_MICRO_BATCHES must be a positive whole number"),
        ({"BATCH_SIZE": 1.5}, "BATCH_SIZE must be"),
        ({"TENSOR_SHAPE": (1, 0)}, "TENSOR_SHAPE must be a tuple"),
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
    (tmp_path / "config.yaml").write_text("")
    with pytest.raises(UsageError, match=r"a dict or a Python file, and .* is no file that ends in \.py"):
        read_config(tmp_path / file)


def test_a_slip_at_the_top_is_told(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("pipeflow"), "propagate", True)
    assert read_config({"NUM_MICROBATCHES": 4, "BATCH_SIZE": 2, "HIDDEN": 3}).NUM_MICROBATCHES == 4
    [record] = {id(record): record for record in caplog.records}.values()  # from whichever logger pytest hears it
    assert (
        record.getMessage() == "the configuration's 'NUM_MICROBATCHES' is not read: did you mean 'NUM_MICRO_BATCHES'?"
    )
