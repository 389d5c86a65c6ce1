"""A classifier, as in Lightning's first example:

torchrun --nproc-per-node 2 examples/lightning_loops/classifier.py
"""

import lightning as L
import torch
from data import digits
from torch import nn
from torch.nn import functional as F

from pipeflow.lightning import PipelineStrategy


class Classifier(L.LightningModule):
    """Layers that find the brighter quarter of an image."""

    def __init__(self):
        super().__init__()
        layers = [nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(3)]
        self.layers = nn.Sequential(nn.Flatten(), *layers, nn.Linear(64, 4))

    def training_step(self, batch, batch_idx):
        images, labels = batch
        loss = F.cross_entropy(self.layers(images), labels)
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


if __name__ == "__main__":
    L.seed_everything(0)
    logger = L.pytorch.loggers.CSVLogger("logs", "classifier")
    options = {"accelerator": "cpu", "max_epochs": 3, "log_every_n_steps": 1, "logger": logger}
    trainer = L.Trainer(strategy=PipelineStrategy(schedule="1f1b", microbatches=4), devices=2, **options)
    trainer.fit(Classifier(), digits())
