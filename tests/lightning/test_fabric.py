"""Fabric's loop with steps of a LightningModule, against the same in one process; resumed under another layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from pipeflow import UsageError
from pipeflow.testing import run_processes

pytest.importorskip("lightning", reason="not installed", exc_type=ImportError)
from lightning.fabric import Fabric

from tests.lightning.modules import BATCH, Classifier, make_images

pytestmark = pytest.mark.filterwarnings("ignore")


class Told(Classifier):
    """Fabric logs no metrics themselves."""

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self(batch[0])
        self.log("right", self.right((logits.argmax(1) == batch[1]).float()))
        return {"logits": logits, "loss": nn.functional.cross_entropy(logits, batch[1])}


def made(ranks: int, sizes: dict[str, Any] | None) -> tuple[Any, dict[str, Any]]:
    """Fabric, alone or with a pipeline, and what it has set up."""
    strategy: Any = "auto"
    if sizes is not None:
        from pipeflow.adapters.lightning.fabric import PipelineStrategy

        strategy = PipelineStrategy(**sizes)
    fabric = Fabric(accelerator="cpu", devices=ranks, strategy=strategy)
    fabric.launch()
    fabric.seed_everything(3, verbose=False)
    module = Told()
    model, optimizer = fabric.setup(module, torch.optim.AdamW(module.parameters(), lr=3e-3))
    return fabric, {"model": model, "optimizer": optimizer, "step": 0}


def train(folder: Path, ranks: int = 1, sizes: dict[str, Any] | None = None, resume: bool = False) -> list[float]:
    """Losses, from step 4 on if the state is resumed that is saved then; then outputs in evaluation."""
    fabric, state = made(ranks, sizes)
    model, optimizer = state["model"], state["optimizer"]
    loader = fabric.setup_dataloaders(DataLoader(make_images(), batch_size=BATCH))
    if resume:
        fabric.load(folder / "state", state)
    seen = []
    for number, batch in enumerate(loader):
        if number < state["step"]:
            continue
        loss = model.training_step(batch, number)
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=0.1)
        optimizer.step()
        optimizer.zero_grad()
        seen.append(float(loss))
        state["step"] += 1
        if state["step"] == 4 and sizes is not None and not resume:
            fabric.save(folder / "state", state)
    model.eval()
    with torch.no_grad():
        told = model.validation_step(batch, 0)
    return [*seen, float(told["loss"]), *told["logits"].flatten().tolist()]


@pytest.mark.exhaustive
def test_steps_train_as_in_one_process_and_resume_under_another_layout(tmp_path: Path) -> None:
    expected = train(tmp_path)
    for seen in run_processes(train, 2, tmp_path, 2, {"microbatches": 2}, deadline=200.0):
        assert seen == pytest.approx(expected, abs=1e-5)
    chunks = {"schedule": "interleaved-1f1b", "schedule_options": {"chunks": 2}}
    for seen in run_processes(train, 2, tmp_path, 2, chunks, True, deadline=200.0):
        assert seen == pytest.approx(expected[4:], abs=1e-5)


@pytest.mark.usefixtures("alone")
def test_a_module_runs_its_forward_or_its_steps() -> None:
    fabric, state = made(1, {"microbatches": 2})
    model, [images, labels] = state["model"], next(iter(DataLoader(make_images(), batch_size=BATCH)))
    loss = model.training_step([images, labels], 0)
    with pytest.raises(UsageError, match=r"called again before the backward of its last loss: .* fabric\.backward"):
        model.training_step([images, labels], 1)
    fabric.backward(loss)
    with pytest.raises(UsageError, match="cut by its steps, so a pipeline does not run its forward: call either"):
        model(images)
