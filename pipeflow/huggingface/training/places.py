"""What trainers read from their arguments and from a model: this rank's place among the replicas, and attributes of the
whole model.
"""

from __future__ import annotations

import os
from functools import partial
from typing import Any

from pipeflow.huggingface.generation.text import generate
from pipeflow.huggingface.lazy_import import library
from pipeflow.huggingface.training.accelerator import World
from pipeflow.parallel.context import Context

_SHOWN = ("config", "generation_config", "main_input_name", "dtype", "add_model_tags")


def place_arguments(args: Any, context: Context) -> None:
    """Tells TrainingArguments this rank's place. transformers' processes are replicas here."""
    local = int(os.environ.get("LOCAL_RANK", context.rank))
    args.distributed_state = World(context.data_size, context.rank, local, context.device)
    args._n_gpu = int(context.device.type == "cuda")
    vars(args)["_setup_devices"] = context.device
    args.average_tokens_across_devices = False  # the Trainer adds up the items of all replicas


def show_attributes(model: Any) -> None:
    """Gives a Pipeline the attributes of its module that trainers read, and `generate`."""
    root = model.chunks[0].root
    for name in _SHOWN:
        if not hasattr(model, name) and hasattr(root, name):
            setattr(model, name, getattr(root, name))
    if not hasattr(model, "generate"):
        model.generate = partial(generate, model)


def shifts_labels(module: Any) -> bool:
    """True if a module's loss does not count the first label of each sequence, by transformers' own table."""
    losses = library().loss.loss_utils
    is_shifted = losses.LOSS_MAPPING.get(getattr(module, "loss_type", None)) is losses.ForCausalLMLoss
    return is_shifted and not getattr(module.config, "is_encoder_decoder", False)
