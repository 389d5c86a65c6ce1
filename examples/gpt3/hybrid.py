r"""Train a GPT from a configuration file: with a pipeline, tensor ranks and replicas, in 16 or 32 bits. At the end it
says what was learnt, and draws its last step below the plan. A script for one process would not have the lines that end
in `# parallel`.

    python examples/gpt3/hybrid.py --config examples/gpt3/configs/tiny_hybrid.py
    python examples/gpt3/hybrid.py --config examples/gpt3/configs/tiny_hybrid.py --world_size 8 --steps 5
    DATA=my.jsonl torchrun --nproc-per-node 4 examples/gpt3/hybrid.py --config examples/gpt3/configs/gpt2_hybrid.py

Without torchrun it starts the processes itself: those of one replica, or --world_size. The text is $DATA, with one
{"text": ...} per line, by default the sources of Python's standard library.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import torch

import pipeflow
from pipeflow.training import (
    Config,
    LogHook,
    ThroughputHook,
    Trainer,
    get_dataloader,
    get_dist_logger,
    launch_from_config,
    make_engine,
    read_config,
)

if not __package__:  # run as a script
    sys.path.insert(0, str(Path(__file__).parents[1]))

from gpt3.build import PRESETS, Preset
from gpt3.data import library
from gpt3.model import GPTLMLoss
from gpt3.plan import PlanHook
from gpt3.ranks import errors_in_one_line, is_rank, start_ranks
from gpt3.webtext import WebtextDataset

NEEDED = {"NUM_EPOCHS", "SEQ_LEN", "BATCH_SIZE", "NUM_MICRO_BATCHES", "model"}
OPTIONAL = {
    *("NUM_CHUNKS", "TENSOR_SHAPE", "LEARNING_RATE", "WEIGHT_DECAY", "DROP_RATE", "SCHEDULE", "LOG_PATH", "seed"),
    *("parallel", "fp16", "bf16", "clip_grad_norm", "gradient_accumulation"),
}


def main() -> None:
    arguments = read_arguments()
    with errors_in_one_line():
        config = read_config(arguments.config)
        preset = preset_of(config)
        text = Path(os.environ["DATA"]) if os.environ.get("DATA") else library()
        dataset = WebtextDataset(text, config.SEQ_LEN, vocabulary=preset.shape.vocabulary)
        world = config.layout(arguments.world_size).world_size  # parallel
        if world > 1 and not is_rank():  # parallel
            start_ranks(world)  # parallel
        else:
            train(config, preset, dataset, arguments)


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True, metavar="FILE", help="a Python file; examples/gpt3/configs has some")
    parser.add_argument("--world_size", type=int, help="processes to start without torchrun; by default one replica's")
    parser.add_argument("--device", help="device such as cpu; by default a GPU if there is one")
    parser.add_argument("--steps", type=int, help="number of optimizer steps after which to stop")
    return parser.parse_args()


def preset_of(config: Config) -> Preset:
    """The model in the configuration. Raises UsageError for a missing or an unknown key."""
    config.require_keys(NEEDED, OPTIONAL)
    kind = config.model.get("type")
    if kind not in PRESETS:
        raise pipeflow.UsageError(f"model.type {kind!r} does not exist: choose one of {', '.join(PRESETS)}")
    if unread := set(config.model) - {"type", "checkpoint", "num_chunks", "experts", "top_k"}:
        raise pipeflow.UsageError(f"model has unknown keys: {', '.join(sorted(unread))}")
    return PRESETS[kind]


def train(config: Config, preset: Preset, dataset: WebtextDataset, arguments: argparse.Namespace) -> None:
    """The work of one rank, from the launch to the last epoch."""
    context = launch_from_config(config, device=arguments.device)  # parallel
    loader = get_dataloader(dataset, config.BATCH_SIZE, seed=42, shuffle=True, drop_last=True, pin_memory=True)

    chunks = {} if config.num_chunks is None else {"chunks": config.num_chunks}  # parallel
    name = config.given.get("SCHEDULE") or ("interleaved-1f1b" if chunks else "1f1b")  # parallel
    schedule = pipeflow.make_schedule(  # parallel
        name, ranks=config.pipeline, microbatches=config.num_microbatches or 1, **chunks
    )
    dropout = config.given.get("DROP_RATE", 0.0)
    model = preset(
        config.num_chunks or 1,
        config.model.get("checkpoint", False),
        torch.float if config.precision is None else config.precision.parameters,
        placement=schedule.placement,  # parallel
        embed_drop_rate=dropout,
        attn_drop_rate=dropout,
        drop_rate=dropout,
        experts=config.model.get("experts", 0),
        top_k=config.model.get("top_k", 2),
    )
    rate, decay = config.given.get("LEARNING_RATE", 0.00015), config.given.get("WEIGHT_DECAY", 0.01)
    optimizer = torch.optim.Adam(model.parameters(), lr=rate, weight_decay=decay)
    engine = make_engine(model, optimizer, GPTLMLoss(), schedule=schedule)

    samples = config.BATCH_SIZE * context.data_size * config.gradient_accumulation
    get_dist_logger().info(f"global batch size = {samples}", ranks=[0])
    plan = PlanHook(arguments.steps)
    hooks = [ThroughputHook(tokens_per_sample=config.SEQ_LEN), LogHook(every=1), plan]
    Trainer(engine, hooks).fit(loader, config.NUM_EPOCHS, max_steps=arguments.steps)
    plan.tell(engine.model)


if __name__ == "__main__":
    main()
