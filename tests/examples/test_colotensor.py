"""GPT-2 by ColoTensor's names: its sizes, and its run by a number of processes."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
import torch

from colotensor.model import PRESETS, GPTLMLoss, random_batch, split
from pipeflow.colossalai.tensor import ColoParameter, ProcessGroup
from pipeflow.colossalai.utils.model.colo_init_context import ColoInitContext
from pipeflow.testing import run_threads
from tests.examples.conftest import EXAMPLES, kept_numbers
from tests.scripts import run_ranks

pytest.importorskip("transformers", reason="not installed", exc_type=ImportError)


@pytest.mark.parametrize(
    ("name", "count"),
    [("gpt2_medium", 354_823_168), ("gpt2_xl", 1_557_611_200), ("gpt2_10b", 10_279_047_168)],
)
def test_sizes(name: str, count: int) -> None:
    with torch.device("meta"):
        model = PRESETS[name](checkpoint=True)
    assert sum(each.numel() for each in model.parameters()) == count
    assert all(layer.gradient_checkpointing for layer in model.model.transformer.h)


def test_logits_and_loss() -> None:
    model = PRESETS["gpt2_tiny"](vocab_size=64, max_seq_len=16)
    ids, mask = random_batch(2, 9, 64, seed=1)
    logits = model(ids, mask)
    assert logits.shape == (2, 9, 64)
    expected = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    torch.testing.assert_close(GPTLMLoss()(logits, ids), expected)


def test_a_checkpoint_keeps_little() -> None:
    ids, mask = random_batch(2, 16, 64, seed=1)
    models = (PRESETS["gpt2_tiny"](checkpoint, vocab_size=64, max_seq_len=16) for checkpoint in (True, False))
    few, many = (kept_numbers(model, ids, mask) for model in models)
    assert few < many / 5


def sizes_of_parts() -> dict[str, tuple[torch.Size, torch.Size]]:
    """The shape of each parameter, tied ones once: of this rank's part, and of the whole."""
    with ColoInitContext():
        model = PRESETS["gpt2_tiny"](vocab_size=64, max_seq_len=16)
    group = ProcessGroup(tp_degree=2)
    split(model, group)
    found = {}
    for name, each in model.model.named_parameters():
        assert isinstance(each, ColoParameter)
        assert each.process_group == group
        found[name] = (each.shape, each.size_global())
    return found


def test_every_parameter_is_split_as_the_tutorial_says() -> None:
    """By the last dimension, but for the MLP's second layer; norms and the bias of that layer are whole."""
    first, second = run_threads(sizes_of_parts, 2, data=2)
    assert first == second
    assert len(first) == 2 + 2 * 12 + 2
    for name, (part, whole) in first.items():
        ratios = [whole[dim] // part[dim] for dim in range(len(whole))]
        if ".ln_" in name or name.endswith("mlp.c_proj.bias"):
            assert set(ratios) == {1}
        else:
            assert ratios == ([2, 1] if name.endswith("mlp.c_proj.weight") else [*[1] * (len(whole) - 1), 2]), name


def command(folder: Path, **variables: str) -> list[str]:
    """The command that run.sh ends with, under these variables."""
    torchrun = folder / "torchrun"
    torchrun.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n', encoding="utf-8")
    torchrun.chmod(0o755)
    environment = {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", **variables}
    script = [str(EXAMPLES / "colotensor" / "run.sh"), "--steps", "3"]
    return subprocess.run(script, env=environment, capture_output=True, text=True, check=True).stdout.splitlines()


def test_the_number_of_processes_comes_from_the_environment(tmp_path: Path) -> None:
    script = str(EXAMPLES / "colotensor" / "train.py")
    given = ["--standalone", "--nproc_per_node=2", script, "--tp-degree", "2", "--steps", "3"]
    assert command(tmp_path, GPUNUM="2", TPDEGREE="2") == command(tmp_path, NPROC="2", TPDEGREE="2") == given
    assert command(tmp_path) == ["--standalone", "--nproc_per_node=1", script, "--tp-degree", "1", "--steps", "3"]


def losses(ranks: int, *options: str) -> list[float]:
    """The losses that training prints."""
    script, size = EXAMPLES / "colotensor" / "train.py", ("--length", "16", "--steps", "3")
    said = run_ranks(script, *size, "--tp-degree", str(ranks), *options, ranks=ranks, COLUMNS="200", HF_HUB_OFFLINE="1")
    assert len(re.findall(r"[\d.]+ TFLOP/s, [\d.]+ GiB", said)) == 3
    return [float(loss) for loss in re.findall(r"step \d: loss ([\d.]+)", said)]


@pytest.mark.slow
def test_two_tensor_ranks_train_what_one_process_trains() -> None:
    alone = losses(1)
    assert len(alone) == 3
    assert losses(2, "--checkpoint") == pytest.approx(alone, abs=2e-4)
