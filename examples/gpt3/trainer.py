r"""Train a GPT with tied embeddings with a Trainer: the shortest complete script. A script for one process would not
have the lines that end in `# parallel`.

    python examples/gpt3/trainer.py
    torchrun --nproc-per-node 4 examples/gpt3/trainer.py --pipeline 2       two stages, two replicas
    torchrun --nproc-per-node 4 examples/gpt3/trainer.py --pipeline 2 --tensor 2 --checkpoints folder

The text is $DATA, with one {"text": ...} per line, by default the sources of Python's standard library.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import torch
from torch.utils.data import random_split

import pipeflow
from pipeflow.models import GPTLMLoss, build_gpt_pipeline
from pipeflow.optim import CosineAnnealingWarmupLR
from pipeflow.training import CheckpointHook, Engine, Hook, LogHook, ThroughputHook, Trainer, get_dataloader

if not __package__:  # run as a script
    sys.path.insert(0, str(Path(__file__).parents[1]))

from gpt3.build import options_of
from gpt3.data import library
from gpt3.webtext import WebtextDataset

SEQUENCE, BATCH = 128, 16


def main() -> None:
    arguments = read_arguments()
    context = pipeflow.launch(arguments.pipeline, arguments.tensor)  # parallel
    schedule = pipeflow.make_schedule("1f1b", ranks=context.pipeline_size, microbatches=4)  # parallel

    shape = pipeflow.GPT.named("tiny")
    text = WebtextDataset(os.environ.get("DATA") or library(), SEQUENCE, vocabulary=shape.vocabulary)
    parts = random_split(text, [0.95, 0.05], torch.Generator().manual_seed(0))
    batch = BATCH // context.data_size  # parallel
    loader = get_dataloader(parts[0], batch, shuffle=True, drop_last=True)
    held_out = get_dataloader(parts[1], batch)

    stages = build_gpt_pipeline(shape.layers, **options_of(shape))
    model = pipeflow.Pipeline(stages, schedule, criterion=GPTLMLoss())  # parallel
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    rate = CosineAnnealingWarmupLR(optimizer, total_steps=arguments.epochs * len(loader), warmup_steps=10)
    engine = Engine(model, optimizer, scheduler=rate, clip_grad_norm=1.0)

    hooks: list[Hook] = [ThroughputHook(tokens_per_sample=SEQUENCE), LogHook()]
    if arguments.checkpoints:
        hooks.append(CheckpointHook(arguments.checkpoints, best="loss"))
    trainer = Trainer(engine, hooks, progress=True)
    trainer.fit(loader, arguments.epochs, test_loader=held_out, max_steps=arguments.steps)


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pipeline", type=int, default=1, help="pipeline stages (%(default)s)")  # parallel
    parser.add_argument("--tensor", type=int, default=1, help="processes per stage (%(default)s)")  # parallel
    parser.add_argument("--epochs", type=int, default=1, help="training epochs (%(default)s)")
    parser.add_argument("--steps", type=int, help="number of steps after which to stop")
    parser.add_argument("--checkpoints", metavar="FOLDER", help="save every epoch there, and resume from the newest")
    return parser.parse_args()


if __name__ == "__main__":
    main()
