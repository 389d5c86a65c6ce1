"""Adapters, such as peft's LoRA: what a Pipeline of an adapted model saves is what peft reads. peft itself is never
imported: an adapted model brings its own functions. What must not live here: how they are trained, which needs nothing.
"""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from pipeflow.checkpoint.pieces import local_tensors
from pipeflow.checkpoint.tensor_files import Output, TensorFiles, write_together
from pipeflow.runtime.pipeline import Pipeline

_PARTS = ".adapters-in-parts"


def is_adapted(root: object) -> bool:
    """Whether a model has adapters of peft around it."""
    return hasattr(root, "peft_config") and hasattr(root, "base_model") and hasattr(root, "save_pretrained")


def save_adapters(model: Pipeline, root: Any, folder: Path) -> None:
    """Writes the adapters of all stages to a folder that peft reads, and nothing of the model they adapt. All ranks
    call it together, inside the alarm. Each writes what it trains; rank 0 reads that again, and peft writes it as one.
    """
    tensors = [each for each in local_tensors(model, model.context, None) if each.tensor.requires_grad]
    outputs = [Output(each, (each.name,), partial(_as_it_is, each.name)) for each in tensors]
    write_together(folder / _PARTS, outputs, model.context, shard_bytes=5 * 10**9)
    if model.context.rank == 0:
        stored = TensorFiles(folder / _PARTS)
        state = {name: stored[name][...] for name in stored.by_file(list(stored.files))}
        root.save_pretrained(folder, state_dict=state)
        shutil.rmtree(folder / _PARTS)


def _as_it_is(name: str, whole: Tensor) -> dict[str, Tensor]:
    return {name: whole}
