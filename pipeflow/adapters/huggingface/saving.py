"""save_pretrained: saves a Pipeline of a transformers model as a folder that transformers reads."""

from __future__ import annotations

import copy
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from pipeflow.adapters.huggingface.keys import targets_of
from pipeflow.adapters.huggingface.peft_adapters import is_adapted, save_adapters
from pipeflow.adapters.huggingface.skeleton import Blueprint
from pipeflow.adapters.libraries import transformers_library
from pipeflow.core.errors import UsageError
from pipeflow.engine.parallel.transport.agreement import all_gather
from pipeflow.engine.runtime.pipeline import Pipeline
from pipeflow.engine.stages.stage import ModuleStage
from pipeflow.training.checkpoint.pieces import local_tensors
from pipeflow.training.checkpoint.tensor_files import OutputTensor, write_together


def save_pretrained(model: Pipeline, folder: str | os.PathLike[str], *, shard_bytes: int = 5 * 10**9) -> None:
    """Saves a model to a folder that `from_pretrained` of transformers and of pipeflow reads. All ranks call it
    together; it returns when all have written.

    The ranks of the first replica write the weights of their own stages under transformers' names; weights split over
    tensor ranks are written whole, a tied weight once. Existing files are replaced after all new ones were written. For
    a model with peft adapters only the adapters are saved, as peft does.

    Args:
        model: Pipeline of a transformers model, made by `from_pretrained`, `from_config` or `Pipeline.from_module`.
        folder: folder on storage that all ranks share.
        shard_bytes: maximum size of a file in bytes, unless a single weight is larger.

    Raises UsageError for another model, or if writing failed; PipelineError on the ranks that did not notice.
    """
    context = model.context
    with context.alarm.raised_everywhere():
        context.alarm.expect_slow()
        adapted = next((each.whole for each in model.chunks if isinstance(each, ModuleStage)), None)
        if is_adapted(adapted):
            save_adapters(model, adapted, Path(folder))
            return
        root = module_of(model)
        config = _config(root)
        targets = targets_of(Blueprint(type(root), config, torch.float32).skeleton())
        all_gather(context.world, [0.0])  # torch's default dtype, which all threads share, was changed meanwhile
        tensors = local_tensors(model, context, None)
        if others := [each.name for each in tensors if each.name not in targets]:
            raise UsageError(
                f"the model has {others[0]}, which a {type(root).__name__} with its configuration lacks: merge or "
                "remove added modules, or save with pipeflow.save_safetensors"
            )
        outputs = [OutputTensor(each, targets[each.name].keys, targets[each.name].stored) for each in tensors]

        def beside(part: Path) -> None:
            config.save_pretrained(part)
            if root.can_generate() and root.generation_config is not None:
                root.generation_config.save_pretrained(part)

        for name in ("config.json", "generation_config.json"):
            if not _is_free(Path(folder, name)):
                raise UsageError(f"{Path(folder, name)} was not written by transformers: save to a new folder")
        write_together(Path(folder), outputs, context, shard_bytes=shard_bytes, beside=beside)


def _is_free(file: Path) -> bool:
    """True if nothing is there, or a configuration that transformers wrote."""
    if not os.path.lexists(file):
        return True
    with suppress(OSError, ValueError):
        content = json.loads(file.read_bytes()) if file.is_file() else None
        return isinstance(content, dict) and not content.keys().isdisjoint({"model_type", "transformers_version"})
    return False


def module_of(model: Pipeline) -> Any:
    """The transformers model whose forward this rank's stages run; it has only the parameters of one stage.

    Raises UsageError for a Pipeline of another model.
    """
    chunk = next(iter(model.chunks), None)
    root = chunk.root if isinstance(chunk, ModuleStage) else None
    if not isinstance(root, transformers_library().PreTrainedModel):
        raise UsageError(
            f"this needs a Pipeline of a transformers model, but the model is a {type(root or chunk).__name__}: "
            "make the Pipeline with pipeflow.huggingface.from_pretrained, from_config or Pipeline.from_module"
        )
    return root


def _config(root: Any) -> Any:
    """A copy of the configuration that names the model's class and dtype."""
    config = copy.deepcopy(root.config)
    config.architectures = [type(root).__name__]
    config.dtype = next(each.dtype for each in root.parameters() if each.is_floating_point())
    return config
