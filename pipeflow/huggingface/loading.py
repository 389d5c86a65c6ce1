"""Loading: Pipelines of transformers' models of which each rank makes its own part alone, with the values of a
checkpoint, or with first ones.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import torch

from pipeflow.checkpoint.safetensors import files_of, load_safetensors
from pipeflow.core.errors import UsageError
from pipeflow.core.schedule import Schedule
from pipeflow.huggingface.keys import loaded_names, names_of
from pipeflow.huggingface.kinds import Kind, model_class, read_config
from pipeflow.huggingface.library import library
from pipeflow.huggingface.owned import fill, make_owned, owned_names
from pipeflow.huggingface.skeleton import Blueprint
from pipeflow.parallel.context import current_context
from pipeflow.runtime.pipeline import Pipeline

LOG = logging.getLogger("pipeflow")


def from_config(
    config: Any,
    schedule: Schedule,
    example: object,
    *,
    kind: Kind = None,
    dtype: torch.dtype | None = None,
    seed: int = 0,
    **options: Any,
) -> Pipeline:
    """A Pipeline of a model of transformers with first values, as the model's class gives them. Each rank makes the
    parameters of its own stages alone. What is drawn at random for a parameter depends on `seed` and the parameter's
    name, so the weights are the same under every schedule and layout. The model is in training mode.

    Args:
        config: its configuration, a transformers.PreTrainedConfig.
        schedule, example: as for `Pipeline.from_module`.
        kind: the class of the model, or an auto class such as transformers.AutoModelForCausalLM, or the name of one; by
            default the first of `config.architectures`.
        dtype: of the parameters; by default that which `config` says, else torch's default.
        seed: of what is drawn.
        options: more of `Pipeline.from_module`, such as `cuts`, `criterion` and `autocast`.

    Raises UsageError for a class that is not known, and as `Pipeline.from_module` does.
    """
    context = current_context()
    with context.alarm.raised_everywhere():
        context.alarm.expect_slow()
        blueprint = Blueprint(model_class(config, kind), config, _dtype(dtype, config))
        skeleton = blueprint.skeleton().train()
    model = Pipeline.from_module(skeleton, schedule, example, **options)
    with context.alarm.raised_everywhere():
        context.alarm.expect_slow()
        make_owned(model)
        fill(model, blueprint.initial(owned_names(model), seed))
        model.gradients.prepare()
    return model


def from_pretrained(
    folder: str | os.PathLike[str],
    schedule: Schedule,
    example: object,
    *,
    kind: Kind = None,
    config: Any = None,
    dtype: torch.dtype | None = None,
    **options: Any,
) -> Pipeline:
    """A Pipeline of a model of transformers with the weights that a folder has in safetensors files. Each rank makes
    the parameters of its own stages alone, and reads these alone; of one that is split over the tensor ranks, its
    part. As in transformers the model is in evaluation mode: call `model.train()` to train it with dropout.

    Args:
        folder: as `save_pretrained` of transformers or of pipeflow writes it, on a file system that all ranks see.
        schedule, example: as for `Pipeline.from_module`.
        kind: the class of the model, or an auto class such as transformers.AutoModelForCausalLM, or the name of one; by
            default that which `config.json` names.
        config: the configuration, in the place of the folder's.
        dtype: of the parameters; by default that which the configuration says, else torch's default.
        options: more of `Pipeline.from_module`, such as `cuts`, `criterion` and `autocast`.

    Raises UsageError for a folder or class that is none, for weights that are missing, left over or of another shape,
    all of which it lists, and as `Pipeline.from_module` does.
    """
    context, path = current_context(), Path(folder)
    with context.alarm.raised_everywhere():
        context.alarm.expect_slow()
        config = read_config(path, kind) if config is None else config
        blueprint = Blueprint(model_class(config, kind), config, _dtype(dtype, config))
        skeleton = blueprint.skeleton()
        _read_generation_config(skeleton, path)
        keys = _keys(skeleton, path)
    model = Pipeline.from_module(skeleton, schedule, example, **options)
    with context.alarm.raised_everywhere():
        context.alarm.expect_slow()
        make_owned(model)
    load_safetensors(path, model, names=lambda _, name: keys[name])
    with context.alarm.raised_everywhere():
        model.gradients.prepare()
    return model


def _dtype(asked: torch.dtype | None, config: Any) -> torch.dtype:
    found = getattr(config, "dtype", None) if asked is None else asked
    if isinstance(found, str):
        found = getattr(torch, found, None)
    if found is None:
        return torch.get_default_dtype()
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise UsageError(f"dtype must be a torch.dtype of floating point, such as torch.bfloat16, got {found!r}")
    return found


def _read_generation_config(skeleton: Any, folder: Path) -> None:
    if (folder / "generation_config.json").is_file() and skeleton.can_generate():
        skeleton.generation_config = library().GenerationConfig.from_pretrained(folder, local_files_only=True)


def _keys(skeleton: Any, folder: Path) -> dict[str, str]:
    """By the names of all parameters and persistent buffers: what the files call them."""
    by_name = {name: key for key, name in loaded_names(skeleton, files_of(folder)).items()}
    found: dict[str, str] = {}
    missing: list[str] = []
    for name, same in names_of(skeleton).items():
        key = next((by_name[each] for each in same if each in by_name), None)
        if key is None:
            missing.append(name)
        else:
            found[name] = key
    if missing:
        raise UsageError(f"{folder} lacks {len(missing)} weights of the model: {', '.join(missing)}")
    return found
