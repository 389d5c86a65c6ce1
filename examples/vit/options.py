"""The keys of a configuration of the vision transformer: checks them and converts them to arguments. Must not contain:
training.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sized
from typing import Any

import torch
from torch import nn

import pipeflow
from pipeflow.optim import CosineAnnealingWarmupLR
from pipeflow.training import Config, Mixup
from vit.build import build_stage
from vit.data import Images

MODEL = {
    "IMG_SIZE": "img_size",
    "PATCH_SIZE": "patch_size",
    "HIDDEN_SIZE": "dim",
    "DEPTH": "depth",
    "NUM_HEADS": "num_heads",
    "MLP_RATIO": "mlp_ratio",
    "NUM_CLASSES": "num_classes",
    "DROP_RATE": "dropout",
    "DROP_PATH": "drop_path",
    "CHECKPOINT": "checkpoint",
}
"""Keys of the model, and the arguments of PipelineVisionTransformer that they become."""

NEEDED = {*MODEL, "BATCH_SIZE", "NUM_EPOCHS", "WARMUP_EPOCHS", "LEARNING_RATE", "WEIGHT_DECAY"}
OPTIONAL = {
    *("SEQ_LENGTH", "MIXUP_ALPHA", "LABEL_SMOOTHING", "WORLD_SIZE", "LOG_PATH", "seed", "parallel", "fp16", "bf16"),
    *("NUM_MICRO_BATCHES", "NUM_CHUNKS", "TENSOR_SHAPE", "clip_grad_norm", "gradient_accumulation"),
}


def require_keys(config: Config) -> None:
    """Raises UsageError for a missing or an unknown key, and for a model that cannot be built."""
    config.require_keys(NEEDED, OPTIONAL)
    build_stage(device="meta", **model_options(config))


def layout_of(config: Config, world_size: int | None = None) -> pipeflow.WorldLayout:
    """The layout of the processes. Their number is torchrun's, else `world_size`, else the configuration's WORLD_SIZE,
    else that of one replica. Raises UsageError for a number that does not divide into replicas.
    """
    given = os.environ.get("WORLD_SIZE") or world_size or config.given.get("WORLD_SIZE")
    layout: pipeflow.WorldLayout = config.layout(int(given) if given else None)
    return layout


def validate(config: Config, layout: pipeflow.WorldLayout, images: Images) -> None:
    """Raises UsageError if model, batches, images and layout do not fit together."""
    Mixup(config.given.get("MIXUP_ALPHA", 0.0))  # checks its argument
    batch, microbatches = config.BATCH_SIZE, config.num_microbatches or 1
    samples, uneven = divmod(batch, microbatches)
    passed = (samples, (config.IMG_SIZE // config.PATCH_SIZE) ** 2 + 1, config.HIDDEN_SIZE)
    shape, accumulated = config.tensor_shape, config.gradient_accumulation
    assert isinstance(images.train, Sized)
    steps = len(images.train) // layout.data // batch // accumulated
    stages, side = layout.pipeline * (config.num_chunks or 1), layout.grid.side if layout.grid else layout.tensor
    parts = f"tensor={side}" if layout.grid is None else f"{side} parts of a grid of tensor ranks"
    for broken, message in (
        (config.NUM_HEADS % side, f"NUM_HEADS {config.NUM_HEADS} does not divide into {parts}"),
        (stages > config.DEPTH, f"DEPTH {config.DEPTH} is too few layers for {stages} stages"),
        (layout.pipeline > 1 and config.num_microbatches is None, "a pipeline needs NUM_MICRO_BATCHES"),
        (batch < microbatches, f"BATCH_SIZE {batch} does not fill NUM_MICRO_BATCHES {microbatches}"),
        (
            uneven and shape is not None and shape[0] is not None,
            f"BATCH_SIZE {batch} does not divide into NUM_MICRO_BATCHES {microbatches}, and TENSOR_SHAPE begins with "
            f"{shape and shape[0]}: begin it with None",
        ),
        (
            shape not in (None, passed, (None, *passed[1:])),
            f"TENSOR_SHAPE is {shape}, and stages pass on {passed}: "
            "BATCH_SIZE // NUM_MICRO_BATCHES, the patches and 1, HIDDEN_SIZE",
        ),
        (
            steps < 1,
            f"{len(images.train)} images do not fill a step of {layout.data} x {accumulated} batches of {batch}",
        ),
        (
            images.classes > config.NUM_CLASSES,
            f"NUM_CLASSES is {config.NUM_CLASSES}, and the images are of {images.classes} classes",
        ),
        (
            not 0 <= config.WARMUP_EPOCHS < config.NUM_EPOCHS,
            f"WARMUP_EPOCHS must be 0 or more and less than NUM_EPOCHS {config.NUM_EPOCHS}, got {config.WARMUP_EPOCHS}",
        ),
        (not config.LEARNING_RATE > 0, f"LEARNING_RATE must be a positive number, got {config.LEARNING_RATE}"),
    ):
        if broken:
            raise pipeflow.UsageError(message)


def model_options(config: Config) -> dict[str, Any]:
    """The arguments of `build_pipeline_vit`, with the paper's initial weights."""
    named = {argument: config.given[key] for key, argument in MODEL.items()}
    return {**named, "init_method": "jax", "seed": 0 if config.seed is None else config.seed}


def make_optimizer(
    parameters: Iterable[nn.Parameter], config: Config, epoch_steps: int
) -> tuple[torch.optim.Optimizer, CosineAnnealingWarmupLR]:
    """AdamW and its learning rate: a warm-up, then half a cosine, stepped after each of an epoch's `epoch_steps`."""
    optimizer = torch.optim.AdamW(parameters, lr=config.LEARNING_RATE, weight_decay=config.WEIGHT_DECAY)
    total, warm = (epochs * epoch_steps for epochs in (config.NUM_EPOCHS, config.WARMUP_EPOCHS))
    return optimizer, CosineAnnealingWarmupLR(optimizer, total_steps=total, warmup_steps=warm)
