"""A checkpoint that is written while training goes on: the host does not wait, and the file has the weights of then."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pipeflow import make_schedule
from pipeflow.engine.parallel.context import current_context
from pipeflow.testing import run_threads
from pipeflow.testing.models import PlainModel
from pipeflow.training import Engine
from pipeflow.training.checkpoint.load import load_checkpoint
from pipeflow.training.checkpoint.pieces import wholes
from pipeflow.training.checkpoint.save import save_checkpoint
from pipeflow.training.checkpoint.storage import write, write_items
from tests.nccl.device import OnDevice, pretended
from tests.nccl.recorder import Recorder, recorded
from tests.nccl.replay import Synchronize
from tests.runtime.work import build

MODEL = PlainModel()


def save(folder: Path, asynchronous: bool, found: list[Any]) -> None:
    model = build(MODEL, make_schedule("1f1b", ranks=1, microbatches=2))
    engine = Engine(model, torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False), non_finite="ignore")
    for _ in range(2):  # which try how the loss is divided
        engine.train_step(iter([MODEL.batch(4)]))
    recorder = current_context().world
    assert isinstance(recorder, Recorder)
    expected: dict[str, Tensor] = {name: each.detach().cpu().clone() for name, each in model.named_parameters()}
    recorder.log.clear()
    saving = save_checkpoint(folder / "saved", model, engine.optimizer, asynchronous=asynchronous)
    engine.train_step(iter([MODEL.batch(4)]))
    found += [expected, [each for each in recorder.log if isinstance(each, Synchronize)]]
    saving.wait()


def load(folder: Path, expected: dict[str, Tensor]) -> bool:
    """Whether a checkpoint has these weights."""
    model = build(MODEL, make_schedule("1f1b", ranks=1, microbatches=2))
    load_checkpoint(folder / "saved", model)
    weights = dict(model.named_parameters())
    return weights.keys() == expected.keys() and all(torch.equal(weights[name], expected[name]) for name in weights)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_part_of_a_transposed_weight_is_copied_whole(asynchronous: bool, tmp_path: Path) -> None:
    part = torch.arange(12.0).view(3, 4).t()[:2]
    with pretended():
        [item] = write_items(wholes({"part": OnDevice(part)}), {})
        item = item.copied() if asynchronous else item
        torch.cuda.synchronize()
        [written], _ = write(tmp_path / "file", [item])
    data = (tmp_path / "file").read_bytes()[written.begin : written.begin + written.bytes]
    assert torch.equal(torch.load(io.BytesIO(data)), part)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_checkpoint_has_the_weights_of_its_moment(tmp_path: Path, asynchronous: bool) -> None:
    found: list[Any] = []
    recorded(save, 1, tmp_path, asynchronous, found)
    expected, waits = found
    assert run_threads(load, 1, tmp_path, expected) == [True]
    assert not asynchronous or not waits
