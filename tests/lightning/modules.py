"""LightningModules for tests, as users write them, and runs of them: the same on Lightning alone and in a pipeline."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torchmetrics
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

BATCH = 8


class Classifier(LightningModule):  # type: ignore[misc]  # Lightning's types are not read
    """Blocks of layers, a scheduler, logs of every kind, and a list of outputs."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.save_hyperparameters()
        layers = [nn.TransformerEncoderLayer(4, 2, 8, dropout, batch_first=True) for _ in range(4)]
        self.blocks = nn.ModuleList(layers)
        self.head = nn.Linear(12, 5)
        self.right, self.mean = torchmetrics.MeanMetric(), torchmetrics.MeanMetric()
        both: Any = {"sum": torchmetrics.SumMetric(), "max": torchmetrics.MaxMetric()}
        self.own = torchmetrics.MetricCollection(both, prefix="own_")
        self.value = self.own.clone(prefix="value_")
        self.kept: list[Tensor] = []

    def forward(self, images: Tensor) -> Tensor:
        hidden = images.flatten(2)
        for block in self.blocks:
            hidden = block(hidden)
        logits: Tensor = self.head(hidden.flatten(1))
        return logits

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        images, labels = batch
        logits = self(images)
        loss = nn.functional.cross_entropy(logits, labels)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log_dict(
            {"right": (logits.argmax(1) == labels).float().mean(), "index": batch_idx}, on_step=False, on_epoch=True
        )
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        images, labels = batch
        logits = self(images)
        loss = nn.functional.cross_entropy(logits, labels)
        self.log("val_loss", loss, batch_size=len(images))
        value = self.right((logits.argmax(1) == labels).float())
        self.log_dict({"val_right": self.right, "val_last": value})
        self.own.update(logits)
        self.log_dict(self.own)
        self.log_dict(self.value(logits))
        self.mean.update(logits)
        self.kept.append(logits.square())
        return {"val_loss": loss, "logits": logits}

    def on_validation_epoch_end(self) -> None:
        self.log_dict({"mean": self.mean.compute(), "squares": torch.cat(self.kept).mean()})
        self.mean.reset()
        self.kept.clear()

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits: Tensor = self(batch[0])
        return logits

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5), "interval": "step"},
        }


def make_images(samples: int = 60) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(samples, 3, 2, 2, generator=generator)
    labels = images.flatten(1)[:, :5].argmax(1)
    labels[::7] = -100  # microbatches have other numbers of labels
    return TensorDataset(images, labels)


class Continued:
    """Batches in another order each epoch, which go on where they were when the state was saved."""

    def __init__(self) -> None:
        self.place = 0

    def __len__(self) -> int:
        return 7

    def __iter__(self) -> Iterator[Any]:
        epoch, first = divmod(self.place, len(self))
        data = make_images(BATCH * len(self))
        order = torch.randperm(len(data), generator=torch.Generator().manual_seed(epoch))
        for samples in order.split(BATCH)[first:]:
            self.place += 1
            yield data[samples]

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


class Seen(Callback):  # type: ignore[misc]  # as above
    """What a run computes: the rate before each batch and its loss, rates after it, and what callbacks are told."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.others: list[float] = []

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        self.losses.append(trainer.optimizers[0].param_groups[0]["lr"])

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]) * trainer.accumulate_grad_batches)
        self.others.append(trainer.optimizers[0].param_groups[0]["lr"])

    def on_validation_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        self.others += [float(outputs["val_loss"]), *outputs["logits"].flatten().tolist()]


def trainer_of(which: str, folder: Path, ranks: int, sizes: dict[str, Any], **options: Any) -> Any:
    """Lightning's Trainer, alone or with a pipeline of `ranks` processes."""
    plain = {"enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu", "logger": False}
    if which == "alone":
        return Trainer(devices=1, default_root_dir=folder, **{**plain, **options})
    from pipeflow.lightning import PipelineStrategy

    strategy = PipelineStrategy(**sizes)
    return Trainer(strategy=strategy, devices=ranks, default_root_dir=folder, **{**plain, **options})


def fit(
    which: str,
    folder: Path,
    ranks: int = 1,
    sizes: dict[str, Any] | None = None,
    resume: str | None = None,
    shuffle: bool = True,
    batch: int = BATCH,
    sampler: Any = None,
    loader: Any = None,
    **options: Any,
) -> Any:
    """Trains a Classifier, with batches of `loader` if there is one: the losses of all batches, what else was seen, and
    the last metrics.
    """
    seed_everything(3, verbose=False)
    seen = Seen()
    options = {"max_epochs": 3, "enable_checkpointing": False, **options}
    options["callbacks"] = [seen, *options.get("callbacks", [])]
    trainer = trainer_of(which, folder, ranks, sizes or {}, **options)
    trainer.fit(
        Classifier(),
        loader or DataLoader(make_images(), batch_size=batch, shuffle=shuffle and sampler is None, sampler=sampler),
        DataLoader(make_images(20), batch_size=BATCH),
        ckpt_path=resume,
    )
    return seen.losses, seen.others, {name: float(value) for name, value in trainer.callback_metrics.items()}
