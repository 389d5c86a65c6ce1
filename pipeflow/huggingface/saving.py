"""Saving: a Pipeline of a model of transformers as a folder that transformers reads."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import torch

from pipeflow.checkpoint.pieces import local_tensors
from pipeflow.checkpoint.tensor_files import Output, write_together
from pipeflow.core.errors import UsageError
from pipeflow.huggingface.adapters import is_adapted, save_adapters
from pipeflow.huggingface.keys import targets_of
from pipeflow.huggingface.library import library
from pipeflow.huggingface.skeleton import Blueprint
from pipeflow.parallel.transport.agreement import all_gather
from pipeflow.runtime.pipeline import Pipeline
from pipeflow.stages.stage import ModuleStage


def save_pretrained(model: Pipeline, folder: str | os.PathLike[str], *, shard_bytes: int = 5 * 10**9) -> None:
    """Writes a folder that `from_pretrained` reads, that of transformers and that of pipeflow. All ranks call it
    together, and it returns when all have written. The ranks of the first replica write the weights of their own
    stages, those that are split over the tensor ranks whole, under the names that transformers gives them; a tied
    weight is written once. What the folder had of these files is replaced when all new ones are written. Of a model
    that peft has adapted the adapters alone are written, as peft does.

    Args:
        model: a Pipeline of a model of transformers, of `from_pretrained`, `from_config` or `Pipeline.from_module`.
        folder: on a file system that all ranks see.
        shard_bytes: how large a file may become, unless one weight alone is larger.

    Raises UsageError for another model, and where writing failed; PipelineError on the ranks that did not notice.
    """
    context = model.context
    with context.alarm.raised_everywhere():
        context.alarm.expect_slow()
        adapted = next((each.root for each in model.chunks if isinstance(each, ModuleStage)), None)
        if is_adapted(adapted):
            save_adapters(model, adapted, Path(folder))
            return
        root = module_of(model)
        config = _config(root)
        targets = targets_of(Blueprint(type(root), config, torch.float32).skeleton())
        all_gather(context.world, [0.0])  # torch's default dtype was another one meanwhile, on all threads
        tensors = local_tensors(model, context, None)
        if others := [each.name for each in tensors if each.name not in targets]:
            raise UsageError(
                f"the model has {others[0]}, which a {type(root).__name__} of its configuration has not: merge or "
                "remove what was added to it, or save with pipeflow.save_safetensors"
            )
        outputs = [Output(each, targets[each.name].keys, targets[each.name].stored) for each in tensors]

        def beside(part: Path) -> None:
            config.save_pretrained(part)
            if root.can_generate() and root.generation_config is not None:
                root.generation_config.save_pretrained(part)

        write_together(Path(folder), outputs, context, shard_bytes=shard_bytes, beside=beside)


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


def _config(root: Any) -> Any:
    """The configuration of what is saved."""
    config = copy.deepcopy(root.config)
    config.architectures = [type(root).__name__]
    config.dtype = next(each.dtype for each in root.parameters() if each.is_floating_point())
    return config
