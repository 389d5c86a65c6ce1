"""Adapters, such as peft's LoRA: saves the adapters of a Pipeline so that peft can read them. peft is never imported;
an adapted model brings its own functions. Must not contain: training, which needs no special code.
"""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from pipeflow.checkpoint.pieces import local_tensors
from pipeflow.checkpoint.tensor_files import OutputTensor, TensorFiles, write_together
from pipeflow.runtime.pipeline import Pipeline

_PARTS = ".adapters-in-parts"
LOADED = (
    "load adapters with peft.PeftModel.from_pretrained(module, folder, is_trainable=True), then call "
    "pipeflow.Pipeline.from_module"
)
"""Advice for a folder of adapters, for errors."""


def has_adapters(folder: Path) -> bool:
    """Returns True if peft saved adapters in a folder."""
    return (folder / "adapter_config.json").is_file()


def is_adapted(root: object) -> bool:
    """True if a model has adapters of peft."""
    return hasattr(root, "peft_config") and hasattr(root, "base_model") and hasattr(root, "save_pretrained")


def save_adapters(model: Pipeline, root: Any, folder: Path) -> None:
    """Saves the adapters of all stages, without the adapted model, to a folder that peft reads. All ranks call it
    together, inside `alarm.raised_everywhere()`. Each writes its own adapters; then rank 0 reads them, and peft writes
    them as one file.
    """
    tensors = [each for each in local_tensors(model, model.context, None) if each.tensor.requires_grad]
    outputs = [OutputTensor(each, (each.name,), partial(_as_it_is, each.name)) for each in tensors]
    write_together(folder / _PARTS, outputs, model.context, shard_bytes=5 * 10**9)
    if model.context.rank == 0:
        stored = TensorFiles(folder / _PARTS)
        state = {name: stored[name][...] for name in stored.by_file(list(stored.files))}
        root.save_pretrained(folder, state_dict=state)
        shutil.rmtree(folder / _PARTS)


def _as_it_is(name: str, whole: Tensor) -> dict[str, Tensor]:
    return {name: whole}
