"""What a PipelineStrategy refuses, each time with one sentence that says what works."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from pipeflow import UsageError
from pipeflow.engine.parallel.context import current_context
from pipeflow.testing import RankError, run_threads

pytest.importorskip("lightning", reason="not installed", exc_type=ImportError)
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    EMAWeightAveraging,
    ModelPruning,
    StochasticWeightAveraging,
)

from tests.lightning.modules import Classifier, make_images, trainer_of

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("alone")]


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


class Thawing(BaseFinetuning):  # type: ignore[misc]  # Lightning's types are not read
    def freeze_before_training(self, module: Any) -> None:
        self.freeze(module.blocks)


class Writing(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = super().training_step(batch, batch_idx)
        self.logger.experiment.add_scalar("loss", loss, batch_idx)
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
        (Writing, "Writing reads self.logger in a step, .* use self.logger in on_train_batch_end"),
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
        ({"callbacks": [EMAWeightAveraging()]}, "EMAWeightAveraging averages the whole module"),
        ({"callbacks": [StochasticWeightAveraging(0.1)]}, "StochasticWeightAveraging averages the whole module"),
        ({"callbacks": [Thawing()]}, "Thawing adds parameters to the optimizer during a run"),
        ({"callbacks": [ModelPruning("l1_unstructured")]}, "ModelPruning prunes the whole module"),
        ({"precision": "16-true"}, "precision '16-true' of HalfPrecision is not possible with a pipeline: use one of"),
    ],
)
def test_an_option_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        fit(Classifier(), **options)


def stepped() -> object:
    from pipeflow.adapters.lightning.model import StepModel

    settings: Any = None
    return StepModel(Classifier(), settings, current_context(), None).run("training_step", None)


def test_batches_that_context_ranks_cannot_divide_are_refused() -> None:
    """The batch of a step is of any form."""
    with pytest.raises(RankError, match="a step of a LightningModule does not say which tensors"):
        run_threads(stepped, 2, context=2)
