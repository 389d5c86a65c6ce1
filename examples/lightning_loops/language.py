"""A language model with a learning-rate schedule that warms up:

torchrun --nproc-per-node 2 examples/lightning_loops/language.py
"""

import lightning as L
import torch
from data import words
from torch import nn
from torch.nn import functional as F

from pipeflow.lightning import PipelineStrategy


class Language(L.LightningModule):
    """A transformer that learns to count."""

    def __init__(self, width=32):
        super().__init__()
        self.save_hyperparameters()
        self.embedding = nn.Embedding(50, width)
        layers = [nn.TransformerEncoderLayer(width, 4, 64, dropout=0.0, batch_first=True) for _ in range(4)]
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(width, 50)

    def forward(self, tokens):
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)

    def training_step(self, batch, batch_idx):
        (tokens,) = batch
        loss = F.cross_entropy(self(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        self.log("loss", loss, prog_bar=True)
        return {"loss": loss}

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=10)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


if __name__ == "__main__":
    L.seed_everything(0)
    logger = L.pytorch.loggers.CSVLogger("logs", "language")
    rates = L.pytorch.callbacks.LearningRateMonitor()
    options = {"accelerator": "cpu", "max_epochs": 3, "log_every_n_steps": 1, "logger": logger, "callbacks": [rates]}
    trainer = L.Trainer(strategy=PipelineStrategy(schedule="1f1b", microbatches=4), devices=2, **options)
    trainer.fit(Language(), words())
