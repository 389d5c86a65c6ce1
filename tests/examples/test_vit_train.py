"""The training script of the vision transformer: what it refuses, and that it trains under every configuration."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

import vit.data
import vit.train
from pipeflow.training import read_config
from tests.examples.conftest import EXAMPLES, run_script
from tests.scripts import run_ranks
from vit.data import Images

CONFIGS = EXAMPLES / "vit" / "configs"
RANKS = {"single": 1, "data_parallel": 2, "pipeline": 2, "hybrid": 4}
TINY = {
    "IMG_SIZE": 8,
    "PATCH_SIZE": 4,
    "HIDDEN_SIZE": 16,
    "DEPTH": 2,
    "NUM_HEADS": 2,
    "NUM_EPOCHS": 2,
    "WARMUP_EPOCHS": 0,
    "BATCH_SIZE": 256,
}


def changed(folder: Path, name: str, **values: object) -> Path:
    """A copy of a configuration, in which these keys have other values, and what follows from them follows."""
    text = (CONFIGS / f"{name}.py").read_text(encoding="utf-8")
    for key, value in values.items():
        text, count = re.subn(rf"^{key} = .*$", f"{key} = {value!r}", text, flags=re.MULTILINE)
        text += "" if count else f"{key} = {value!r}\n"
    file = folder / f"{name}.py"
    file.write_text(text, encoding="utf-8")
    return file


def test_configurations_differ_in_their_layout_alone() -> None:
    """And all train on as many images a step."""
    of_layout = {"parallel", "WORLD_SIZE", "BATCH_SIZE", "NUM_MICRO_BATCHES", "TENSOR_SHAPE", "gradient_accumulation"}
    configs = {file.stem: read_config(file) for file in CONFIGS.glob("*.py")}
    assert configs.keys() == RANKS.keys()
    common = [{key: config.given[key] for key in config.given.keys() - of_layout} for config in configs.values()]
    assert common == common[:1] * len(common)
    for name, config in configs.items():
        vit.options.require_keys(config)
        layout = vit.options.layout_of(config)
        assert layout.world_size == RANKS[name]
        assert config.BATCH_SIZE * layout.data * config.gradient_accumulation == 64


def run_main(monkeypatch: pytest.MonkeyPatch, *options: str) -> tuple[object, list[str]]:
    """What main() ends with, and what it started by then."""
    started: list[str] = []
    images = Images(TensorDataset(torch.zeros(1438, 1)), TensorDataset(torch.zeros(9, 1)), classes=10)
    if "DATA" not in os.environ:
        monkeypatch.setattr(vit.train, "load_images", lambda _: images)
    for name in ("start_ranks", "train", "check"):
        monkeypatch.setattr(vit.train, name, lambda *_, name=name: started.append(name))
    monkeypatch.setattr(sys, "argv", ["train.py", *options])
    try:
        vit.train.main()
    except SystemExit as stopped:
        return stopped.code, started
    return None, started


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"PATCH_SIZE": 7}, "PatchEmbedding: patch_size=7 does not divide image_size=32: resize the images to 28, or"),
        ({"NUM_HEADS": 3}, "num_heads=3 does not divide dim=64"),
        ({"NUM_HEADS": 1}, "NUM_HEADS 1 does not divide into tensor=2"),
        ({"DEPTH": 1}, "DEPTH 1 is too few layers for 2 stages"),
        ({"NUM_CHUNKS": 3}, "DEPTH 4 is too few layers for 6 stages"),
        ({"BATCH_SIZE": 3}, "BATCH_SIZE 3 does not fill NUM_MICRO_BATCHES 4"),
        ({"BATCH_SIZE": 66}, "BATCH_SIZE 66 does not divide into NUM_MICRO_BATCHES 4, and TENSOR_SHAPE begins with 16"),
        ({"TENSOR_SHAPE": (16, 16, 64)}, "TENSOR_SHAPE is (16, 16, 64), and stages pass on (16, 17, 64)"),
        ({"NUM_MICRO_BATCHES": None, "TENSOR_SHAPE": None}, "a pipeline needs NUM_MICRO_BATCHES"),
        ({"BATCH_SIZE": 2048, "TENSOR_SHAPE": None}, "1438 images do not fill a step of 1 x 1 batches of 2048"),
        ({"gradient_accumulation": 23}, "1438 images do not fill a step of 1 x 23 batches of 64"),
        ({"NUM_CLASSES": 9}, "NUM_CLASSES is 9, and the images are of 10 classes"),
        ({"WARMUP_EPOCHS": 30}, "WARMUP_EPOCHS must be 0 or more and less than NUM_EPOCHS 30, got 30"),
        ({"LEARNING_RATE": 0}, "LEARNING_RATE must be a positive number, got 0"),
        ({"MIXUP_ALPHA": -1}, "Mixup's alpha must be at least 0, got -1"),
        ({"DROP_RATES": 0.1}, "the configuration has unknown keys: DROP_RATES"),
        ({"PATCH_SIZ": 8}, "the configuration has unknown keys: PATCH_SIZ"),
        ({"BATCH_SIZES": 8}, "the configuration's 'BATCH_SIZES' is not a known key: did you mean 'BATCH_SIZE'?"),
    ],
    ids=str,
)
def test_what_cannot_work_is_one_line_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, values: dict[str, Any], said: str
) -> None:
    monkeypatch.delenv("DATA", raising=False)
    file = changed(tmp_path, "hybrid", **values)
    if "TENSOR_SHAPE" not in values and "BATCH_SIZE" in values:
        file.write_text(
            file.read_text(encoding="utf-8").replace("BATCH_SIZE // NUM_MICRO_BATCHES", "64 // NUM_MICRO_BATCHES"),
            encoding="utf-8",
        )
    code, started = run_main(monkeypatch, "--config", str(file))
    assert str(code).startswith(f"train.py: {said}")
    assert started == []


@pytest.mark.parametrize(
    ("world", "options", "said"),
    [
        (None, ("--world_size", "6"), "a world of 6 processes is not divisible into replicas of 4"),
        ("3", (), "a world of 3 processes is not divisible into replicas of 4"),
        (
            None,
            ("--config", "nowhere.py"),
            "a configuration is a dict or a Python file; 'nowhere.py' is not an existing .py file",
        ),
    ],
)
def test_worlds_and_files_that_cannot_be(
    monkeypatch: pytest.MonkeyPatch, world: str | None, options: tuple[str, ...], said: str
) -> None:
    monkeypatch.delenv("DATA", raising=False)
    if world is not None:
        monkeypatch.setenv("WORLD_SIZE", world)
    code, started = run_main(monkeypatch, *options)
    assert str(code).startswith(f"train.py: {said}")
    assert started == []
    monkeypatch.setenv("RANK", "1")
    assert run_main(monkeypatch, *options) == (1, [])  # the first rank says it


def test_data_without_torchvision_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DATA", str(tmp_path))
    monkeypatch.setitem(sys.modules, "torchvision.datasets", None)
    said = "train.py: CIFAR-10 in $DATA needs torchvision: pip install torchvision"
    assert run_main(monkeypatch) == (said, [])


@pytest.mark.parametrize(
    ("options", "rank", "begun"),
    [
        (("--config", str(CONFIGS / "single.py")), None, "train"),
        (("--config", str(CONFIGS / "single.py"), "--check"), None, "check"),
        (("--config", str(CONFIGS / "single.py"), "--world_size", "2"), None, "start_ranks"),
        ((), None, "start_ranks"),
        ((), "0", "train"),
        (("--check",), "3", "check"),
    ],
    ids=str,
)
def test_it_starts_processes_unless_it_is_one(
    monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], rank: str | None, begun: str
) -> None:
    for name in ("DATA", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("WORLD_SIZE", "4")
    assert run_main(monkeypatch, *options) == (None, [begun])


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", RANKS)
def test_every_configuration_trains_to_the_end(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
    """Under torchrun's variables; small models that are given little time."""
    pytest.importorskip("sklearn")
    monkeypatch.delenv("DATA", raising=False)
    config, ranks = changed(tmp_path, name, **TINY), RANKS[name]
    printed = run_ranks(EXAMPLES / "vit" / "train.py", "--config", str(config), ranks=ranks, COLUMNS="200")
    stages = 2 if name in ("pipeline", "hybrid") else 1
    assert sorted(set(re.findall(r"parameters on stage (\d)", printed))) == ["0", "1"][:stages]
    assert re.search(r"epoch 2/2, test: loss = \S+, accuracy = 0\.", printed)
    assert re.search(r"\d+\.\d% of the test images are classified correctly", printed)
    assert "planned: 1f1b" in printed
    assert "measured: 1f1b" in printed


@pytest.mark.exhaustive
def test_another_layout_continues_from_a_checkpoint(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    monkeypatch.delenv("DATA", raising=False)
    script, folder = EXAMPLES / "vit" / "train.py", tmp_path / "kept"
    for name, epochs in (("pipeline", 1), ("single", 2)):
        config = changed(tmp_path, name, **{**TINY, "NUM_EPOCHS": epochs})
        options = ("--config", str(config), "--checkpoints", str(folder))
        printed = run_ranks(script, *options, ranks=RANKS[name], COLUMNS="200")
        assert re.findall(r"epoch (\d)/\d, test", printed)[0] == str(epochs)
    assert (folder / "best").exists()


@pytest.mark.exhaustive
def test_replicas_of_the_hybrid_layout_train_what_one_process_would(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """More than 1e-9 apart is an exit status of 1. It starts its eight processes itself."""
    pytest.importorskip("sklearn")
    monkeypatch.delenv("DATA", raising=False)
    config = changed(tmp_path, "hybrid", **{**TINY, "BATCH_SIZE": 16, "DROP_RATE": 0.1, "DROP_PATH": 0.1})
    config.write_text(config.read_text(encoding="utf-8") + "gradient_accumulation = 2\n", encoding="utf-8")
    printed = run_script("vit/train.py", "--check", "--config", str(config), "--world_size", "8", COLUMNS="200")
    assert re.search(r"largest difference from one process in 20 steps: loss \S+, weights \S+", printed)
    assert "measured: 1f1b, 2 ranks, 4 microbatches" in printed
