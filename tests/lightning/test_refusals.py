"""What a PipelineStrategy refuses, each time with one sentence that says what works."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from pipeflow import UsageError
from pipeflow.parallel.context import context_if_launched

pytest.importorskip("lightning", reason="not installed", exc_type=ImportError)
from tests.lightning.modules import Classifier, make_images, trainer_of

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Iterator[None]:
    """A world of one process, whose context is closed at the end."""
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    yield
    context = context_if_launched()
    if context is not None:
        context.close()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


TWO = {"schedule": "interleaved-1f1b", "schedule_options": {"chunks": 2}, "microbatches": 2}
"""Two stages on one rank."""


def fit(module: Any, **options: Any) -> None:
    options = {"max_steps": 2, "enable_checkpointing": False, **options}
    trainer = trainer_of("pipeline", Path.cwd(), 1, TWO, **options)
    trainer.fit(module, DataLoader(make_images(), batch_size=8))


class Manual(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Two(Classifier):
    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.head.parameters(), 0.1), torch.optim.SGD(self.blocks.parameters(), 0.1)]


class Newton(Classifier):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


class Wrapped(Classifier):
    def __init__(self) -> None:
        super().__init__()
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        self.inner = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))


class Another(Classifier):
    def backward(self, loss: Tensor, *_: Any, **__: Any) -> None:
        (self.head.weight.sum() * 0.1).backward()


class Branching(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        hidden = batch[0].flatten(2)
        for block in self.blocks:
            hidden = block(hidden)
            if hidden.mean() > 0.5:
                break
        loss: Tensor = hidden.mean()
        return loss


class Lossless(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch[0])


class Silent(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        super().training_step(batch, batch_idx)


class Late(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = self(batch[0]).mean()
        if batch_idx:
            self.log("size", loss.abs())
        return loss


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (Manual, "automatic_optimization=False, but a pipeline runs the backwards within a step: set it to True"),
        (Two, "has 2 optimizers, but a pipeline steps one: use one optimizer with several parameter groups"),
        (Newton, "LBFGS is not possible with a pipeline"),
        (Wrapped, "DDP or FSDP wraps, but a pipeline needs neither"),
        (Another, "differentiates another loss than training_step returned"),
        (Branching, "Branching.training_step cannot be cut into stages"),
        (Lossless, "returned no loss, but a .*Tensor: return a scalar tensor"),
        (Silent, "returned no loss, but a NoneType"),
        (Late, "Late.training_step returns or logs something in some batches only, after a first batch without: do it"),
    ],
)
def test_a_module_is_refused(module: type[Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        fit(module())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sync_batchnorm": True}, "sync_batchnorm=True is not possible"),
        ({"precision": "16-true"}, "precision '16-true' of HalfPrecision is not possible with a pipeline: use one of"),
    ],
)
def test_an_option_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        fit(Classifier(), **options)
