"""Training from configuration files: every one of them can be read and fits its model, every key is used or refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import gpt3.hybrid
from pipeflow import UsageError
from pipeflow.optim import HalfPrecision
from pipeflow.training import read_config
from tests.examples.conftest import GPT3
from tests.scripts import run_ranks

CONFIGS = sorted((GPT3 / "configs").glob("*.py"))
SMALLEST = {
    "NUM_EPOCHS": 1,
    "SEQ_LEN": 16,
    "BATCH_SIZE": 4,
    "NUM_MICRO_BATCHES": 2,
    "model": {"type": "GPT_tiny_pipeline_hybrid"},
}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_configuration_fits_its_model(path: Path) -> None:
    config = read_config(path)
    shape = gpt3.hybrid.preset_of(config).shape
    microbatch = config.BATCH_SIZE // config.NUM_MICRO_BATCHES
    assert config.tensor_shape == (microbatch, config.SEQ_LEN, shape.hidden)
    assert shape.positions >= config.SEQ_LEN
    shape.require_tensor(config.tensor)
    assert config.pipeline * (config.num_chunks or 1) <= shape.layers


def test_the_big_ones_are_what_their_names_say() -> None:
    found = {path.stem: read_config(path) for path in CONFIGS}
    assert (found["gpt2_pipeline"].pipeline, found["gpt2_pipeline"].tensor) == (2, 1)
    assert (found["gpt2_hybrid"].pipeline, found["gpt2_hybrid"].tensor) == (2, 2)
    assert (found["gpt3_hybrid"].pipeline, found["gpt3_hybrid"].tensor) == (8, 8)
    for name in ("gpt2_pipeline", "gpt2_hybrid", "gpt3_hybrid"):
        assert found[name].precision == HalfPrecision("parameters", torch.half)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"BATCH_SIZE": None}, "lacks BATCH_SIZE"),
        ({"NUM_STEPS": 3}, "has unknown keys: NUM_STEPS"),
        ({"model": {"type": "GPT5"}}, "model.type 'GPT5' does not exist: choose one of GPT_tiny_pipeline_hybrid, "),
        ({"model": {"type": "GPT2_8B", "layers": 2}}, "model has unknown keys: layers"),
    ],
)
def test_no_key_is_ignored(change: dict[str, Any], said: str) -> None:
    given = {key: value for key, value in (SMALLEST | change).items() if value is not None}
    with pytest.raises(UsageError, match=re.escape(said)):
        gpt3.hybrid.preset_of(read_config(given))


def losses_of(path: Path, text: Path, ranks: int) -> list[float]:
    options, variables = ("--config", str(path), "--steps", "4"), {"DATA": str(text), "COLUMNS": "200"}
    printed = run_ranks(GPT3 / "hybrid.py", *options, ranks=ranks, folder=None, **variables)
    assert "global batch size = 8" in printed
    return [float(loss) for loss in re.findall(r"step \d+ / \d+\]: loss = ([\d.]+)", printed)]


@pytest.mark.slow
def test_it_ends_with_what_was_learnt_and_the_step_that_was_the_last(tmp_path: Path, text: Path) -> None:
    """Also if `--steps` ends within an epoch."""
    config = tmp_path / "small.py"
    config.write_text("".join(f"{name} = {value!r}\n" for name, value in SMALLEST.items()), encoding="utf-8")
    options, variables = ("--config", str(config), "--steps", "3"), {"DATA": str(text), "COLUMNS": "200"}
    printed = run_ranks(GPT3 / "hybrid.py", *options, ranks=1, folder=None, **variables)
    losses = [float(loss) for loss in re.findall(r"step \d+ / \d+\]: loss = ([\d.]+)", printed)]
    learnt = re.search(r"learnt: loss ([\d.]+) -> ([\d.]+), 3 steps, [\d,]+ tokens/s\n", printed)
    assert learnt is not None
    assert [float(loss) for loss in learnt.groups()] == pytest.approx([losses[0], losses[-1]], abs=6e-3)
    said = re.search(r"last step: ([\d.]+)% measured, ([\d.]+)% planned\n", printed)
    assert said is not None
    drawn = printed.partition("planned: 1f1b")[2]
    assert re.findall(r"bubble ([\d.]+)%", drawn) == [said[2], said[1]]


@pytest.mark.exhaustive
def test_layouts_and_accumulation_take_the_same_steps(tmp_path: Path, text: Path) -> None:
    """A pipeline of 2 x 2 in batches of 4, two at a time; and one process in batches of 8, in two chunks."""
    common = "NUM_EPOCHS = 1\nSEQ_LEN = 16\nLEARNING_RATE = 0.01\nclip_grad_norm = 1.0\nDROP_RATE = 0.0\n"
    hybrid, alone = tmp_path / "hybrid.py", tmp_path / "alone.py"
    hybrid.write_text(
        common + "BATCH_SIZE = 4\nNUM_MICRO_BATCHES = 2\nTENSOR_SHAPE = (2, 16, 128)\ngradient_accumulation = 2\n"
        "model = dict(type='GPT_tiny_pipeline_hybrid', checkpoint=True)\n"
        "parallel = dict(pipeline=2, tensor=dict(mode='1d', size=2))\n",
        encoding="utf-8",
    )
    alone.write_text(
        common + "BATCH_SIZE = 8\nNUM_MICRO_BATCHES = 4\nNUM_CHUNKS = 2\nWEIGHT_DECAY = 0.01\n"
        "model = dict(type='GPT_tiny_pipeline_hybrid')\n",
        encoding="utf-8",
    )
    one, other = losses_of(hybrid, text, 4), losses_of(alone, text, 1)
    assert one == pytest.approx(other, abs=2e-4)
    assert one[-1] < one[0] - 0.5


@pytest.mark.exhaustive
def test_experts_over_ranks_take_the_steps_of_one_process(tmp_path: Path, text: Path) -> None:
    """Two replicas in batches of 4, and one process in batches of 8."""
    common = "NUM_EPOCHS = 1\nSEQ_LEN = 16\nLEARNING_RATE = 0.001\nclip_grad_norm = 1.0\nDROP_RATE = 0.0\n"
    common += "model = dict(type='GPT_tiny_pipeline_hybrid', experts=4, top_k=2)\n"
    divided, alone = tmp_path / "divided.py", tmp_path / "alone.py"
    divided.write_text(
        common + "BATCH_SIZE = 4\nNUM_MICRO_BATCHES = 2\nTENSOR_SHAPE = (2, 16, 128)\n"
        "parallel = dict(pipeline=2, experts=2)\n",
        encoding="utf-8",
    )
    alone.write_text(common + "BATCH_SIZE = 8\nNUM_MICRO_BATCHES = 4\n", encoding="utf-8")
    one, other = losses_of(divided, text, 4), losses_of(alone, text, 1)
    assert one == pytest.approx(other, abs=2e-4)
    assert one[-1] < one[0]
