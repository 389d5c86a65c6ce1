"""Saving: a Pipeline of a model of transformers as a folder that transformers reads."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from pipeflow.checkpoint.safetensors import save_safetensors
from pipeflow.core.errors import UsageError
from pipeflow.huggingface.keys import stored_names
from pipeflow.huggingface.library import library
from pipeflow.huggingface.skeleton import Blueprint
from pipeflow.runtime.pipeline import Pipeline
from pipeflow.stages.stage import ModuleStage


def save_pretrained(model: Pipeline, folder: str | os.PathLike[str], *, shard_bytes: int = 5 * 10**9) -> None:
    """Writes a folder that `from_pretrained` reads, that of transformers and that of pipeflow. All ranks call it
    together, and it returns when all have written. The ranks of the first replica write the weights of their own
    stages, those that are split over the tensor ranks whole, under the names that transformers gives them; a tied
    weight is written once. What the folder had of these files is replaced when all new ones are written.

    Args:
        model: a Pipeline of a model of transformers, of `from_pretrained`, `from_config` or `Pipeline.from_module`.
        folder: on a file system that all ranks see.
        shard_bytes: how large a file may become, unless one weight alone is larger.

    Raises UsageError for another model, and where writing failed; PipelineError on the ranks that did not notice.
    """
    path = Path(folder)
    with model.context.alarm.raised_everywhere():
        model.context.alarm.expect_slow()
        root = module_of(model)
        dtype = next(parameter.dtype for parameter in root.parameters() if parameter.is_floating_point())
        keys = stored_names(Blueprint(type(root), root.config, dtype).skeleton())
    save_safetensors(path, model, names=lambda _, name: keys[name], shard_bytes=shard_bytes)
    with model.context.alarm.raised_everywhere():
        if model.context.rank == 0:
            _write_configs(root, path)


def module_of(model: Pipeline) -> Any:
    """The model of transformers whose forward this rank's stages run; of its parameters it has those of one stage.

    Raises UsageError for a Pipeline of something else.
    """
    chunk = next(iter(model.chunks), None)
    root = chunk.root if isinstance(chunk, ModuleStage) else None
    if not isinstance(root, library().PreTrainedModel):
        raise UsageError(
            f"this is for Pipelines of a model of transformers, but the model is a {type(root or chunk).__name__}: "
            "make the Pipeline with pipeflow.huggingface.from_pretrained, from_config or Pipeline.from_module"
        )
    return root


def _write_configs(root: Any, folder: Path) -> None:
    config = root.config
    config.architectures = [type(root).__name__]
    config.dtype = next(str(each.dtype) for each in root.parameters() if each.is_floating_point()).partition(".")[2]
    config.save_pretrained(folder)
    if root.can_generate() and root.generation_config is not None:
        root.generation_config.save_pretrained(folder)
