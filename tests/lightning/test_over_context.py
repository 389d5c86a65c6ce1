"""A LightningModule with a model of transformers trains over context ranks as in one process."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pipeflow.engine.parallel.context import current_context
from pipeflow.testing import run_processes, run_threads

pytest.importorskip("lightning", reason="not installed", exc_type=ImportError)
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader

from pipeflow.adapters.cut_model import cut_settings
from pipeflow.adapters.lightning.model import StepModel
from pipeflow.huggingface import share_tokens
from tests.huggingface.test_shared_tokens import model_of
from tests.runtime.test_context_ranks import refused

LENGTH, STEPS = 16, 3


class OfModel(LightningModule):  # type: ignore[misc]  # Lightning's types are not read
    """A causal model whose own loss is the step's."""

    def __init__(self) -> None:
        super().__init__()
        self.model = share_tokens(model_of("llama", num_hidden_layers=2).float())
        self.losses: tuple[float, ...] = ()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        self.log("loss", loss)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses += (float(outputs["loss"]), float(self.trainer.callback_metrics["loss"]))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-6)


def data() -> list[dict[str, Tensor]]:
    """Of which two samples have few labels, and one has padding at its start."""
    ids = torch.randint(1, 48, (4 * STEPS, LENGTH), generator=torch.Generator().manual_seed(0))
    samples = [{"input_ids": each, "labels": each.clone(), "position_ids": torch.arange(LENGTH)} for each in ids]
    for at, each in enumerate(samples):
        each["attention_mask"] = torch.ones(LENGTH, dtype=torch.long)
        each["labels"][: at % 4 * 5] = -100
        each["attention_mask"][: at % 4] = 0
    return samples


def fit(folder: Path, *, alone: bool) -> tuple[tuple[float, ...], dict[str, Any]]:
    """The losses of all steps, and the weights in the end."""
    module = OfModel()
    options: dict[str, Any] = {"max_epochs": 1, "accelerator": "cpu", "logger": False, "gradient_clip_val": 0.5}
    options |= {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    if alone:
        trainer = Trainer(devices=1, default_root_dir=folder, **options)
    else:
        from pipeflow.lightning import PipelineStrategy

        strategy = PipelineStrategy(microbatches=2)
        trainer = Trainer(strategy=strategy, devices=current_context().world_size, default_root_dir=folder, **options)
    samples: Any = data()
    trainer.fit(module, DataLoader(samples, batch_size=4))
    return module.losses, {name: each.detach() for name, each in module.named_parameters() if not each.is_meta}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_a_module_trains_as_in_one_process(tmp_path: Path, ranks: int) -> None:
    losses, weights = fit(tmp_path, alone=True)
    assert len(losses) == 2 * STEPS
    for its, own in run_processes(fit_over_context, ranks, tmp_path, context=2, deadline=300.0):
        assert its == pytest.approx(losses, abs=1e-5)
        assert own
        for name, weight in own.items():
            torch.testing.assert_close(weight, weights[name], rtol=0, atol=1e-5)


def fit_over_context(folder: Path) -> tuple[tuple[float, ...], dict[str, Any]]:
    return fit(folder, alone=False)


class OfLogits(OfModel):
    """Its loss is computed of logits and labels that are not shifted any more."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self.model(**batch).logits
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


class OfOtherLabels(OfModel):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(**{**batch, "labels": batch["labels"] + 0}).loss
        return loss


class Logging(OfModel):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        output = self.model(**batch)
        self.log("mean", output.logits.mean())
        loss: Tensor = output.loss
        return loss


class WithoutTokens(OfModel):
    def __init__(self) -> None:
        super().__init__()
        self.model = model_of("llama")


def step_of(kind: Callable[[], OfModel], method: str = "training_step") -> Any:
    context = current_context()
    settings = cut_settings("1f1b", 2, None, None, None, None, "microbatches", None, None, context, None)
    batch = {name: torch.stack([each[name] for each in data()[:4]]) for name in data()[0]}
    return StepModel(kind(), settings, context, None).run(method, batch, 0)


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "a loss of logits": (lambda: step_of(OfLogits), "training_step returns the loss of its model as it is"),
    "other labels": (lambda: step_of(OfOtherLabels), "training_step returns the loss of its model as it is"),
    "logs": (lambda: step_of(Logging), "training_step returns and logs its loss alone"),
    "another model": (lambda: step_of(WithoutTokens), "0 of WithoutTokens are known to share tokens"),
    "a validation": (lambda: step_of(OfModel, "validation_step"), "trains only, .* leave validation_step out"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_proved_is_refused(what: str) -> None:
    call, error = REFUSED[what]
    assert all(re.search(error, each) for each in run_threads(refused, 2, call, context=2))
