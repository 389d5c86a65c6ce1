"""A classifier of images with validation, early stopping, the best checkpoint, and a test of it. A run that was stopped
goes on from its last epoch:

torchrun --nproc-per-node 2 examples/lightning_loops/images.py
"""

import lightning as L
import torch
from data import digits
from torch import nn
from torch.nn import functional as F

from pipeflow.lightning import PipelineStrategy


class Images(L.LightningModule):
    """Convolutions that find the brighter quarter of an image."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(1, 8, 3, padding=1)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()) for _ in range(4))
        self.head = nn.Linear(8 * 64, 4)

    def forward(self, images):
        hidden = self.first(images)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.head(hidden.flatten(1))

    def training_step(self, batch, batch_idx):
        images, labels = batch
        loss = F.cross_entropy(self(images), labels)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        images, labels = batch
        logits = self(images)
        self.log_dict(
            {"val_loss": F.cross_entropy(logits, labels), "right": (logits.argmax(1) == labels).float().mean()}
        )

    def test_step(self, batch, batch_idx):
        images, labels = batch
        self.log("test_loss", F.cross_entropy(self(images), labels))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


if __name__ == "__main__":
    L.seed_everything(0)
    logger = L.pytorch.loggers.CSVLogger("logs", "images")
    stop = L.pytorch.callbacks.EarlyStopping("val_loss", patience=2)
    best = L.pytorch.callbacks.ModelCheckpoint("logs/images/saved", monitor="val_loss", save_last=True)
    options = {"accelerator": "cpu", "max_epochs": 8, "log_every_n_steps": 1, "logger": logger}
    options["callbacks"] = [stop, best]
    trainer = L.Trainer(strategy=PipelineStrategy(schedule="1f1b", microbatches=4), devices=2, **options)
    trainer.fit(Images(), digits(), digits(48, seed=1, shuffle=False), ckpt_path="last")
    trainer.test(ckpt_path="best", dataloaders=digits(48, seed=2, shuffle=False))
