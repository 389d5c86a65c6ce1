"""An autoencoder of two modules, with accumulated batches and clipped gradients:

torchrun --nproc-per-node 2 examples/lightning_loops/autoencoder.py
"""

import lightning as L
import torch
from data import digits
from torch import nn
from torch.nn import functional as F

from pipeflow.lightning import PipelineStrategy


class AutoEncoder(L.LightningModule):
    """Images to 3 numbers and back."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3))
        self.decoder = nn.Sequential(nn.Linear(3, 64), nn.ReLU(), nn.Linear(64, 64))

    def training_step(self, batch, batch_idx):
        images, _ = batch
        images = images.flatten(1)
        loss = F.mse_loss(self.decoder(self.encoder(images)), images)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


if __name__ == "__main__":
    L.seed_everything(0)
    logger = L.pytorch.loggers.CSVLogger("logs", "autoencoder")
    options = {"accelerator": "cpu", "max_epochs": 4, "log_every_n_steps": 1, "logger": logger}
    options.update(accumulate_grad_batches=2, gradient_clip_val=0.1)
    trainer = L.Trainer(strategy=PipelineStrategy(schedule="gpipe", microbatches=4), devices=2, **options)
    trainer.fit(AutoEncoder(), digits())
