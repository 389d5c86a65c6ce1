"""A loop of one's own with Fabric:

torchrun --nproc-per-node 2 examples/lightning_loops/fabric_loop.py
"""

import lightning as L
import torch
from data import words
from language import Language
from torch.nn import functional as F

from pipeflow.lightning.fabric import PipelineStrategy

if __name__ == "__main__":
    logger = L.fabric.loggers.CSVLogger("logs", "fabric", flush_logs_every_n_steps=1)
    fabric = L.Fabric(
        strategy=PipelineStrategy(schedule="1f1b", microbatches=4), devices=2, accelerator="cpu", loggers=logger
    )
    fabric.launch()
    fabric.seed_everything(0)
    model = Language()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(words())
    step = 0
    for _ in range(3):
        for (tokens,) in loader:
            loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
            optimizer.zero_grad()
            fabric.backward(loss)
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            fabric.log("loss", loss, step)
            step += 1
    fabric.save("last.ckpt", {"model": model, "optimizer": optimizer, "step": step})
    fabric.load("last.ckpt", {"model": model, "optimizer": optimizer, "step": step})
