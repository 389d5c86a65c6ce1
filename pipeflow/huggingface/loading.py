"""Loading: Pipelines of transformers' models of which each rank makes its own part alone, with the values of a
checkpoint, or with first ones.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from pipeflow.checkpoint.tensor_files import TensorFiles
from pipeflow.core.errors import UsageError
from pipeflow.core.schedule import Schedule
from pipeflow.huggingface.kinds import Kind, model_class, read_config
from pipeflow.huggingface.library import library
from pipeflow.huggingface.owned import fill, make_owned, owned_names
from pipeflow.huggingface.skeleton import Blueprint
from pipeflow.huggingface.stored import Stored, dtype_in, files_in
from pipeflow.parallel.context import Context, current_context
from pipeflow.parallel.transport.agreement import all_gather
from pipeflow.runtime.pipeline import Pipeline


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
    with _together() as context:
        blueprint = Blueprint(model_class(config, kind), config, _dtype(dtype, config))
        skeleton = blueprint.skeleton().train()
        all_gather(context.world, [0.0])  # torch's default dtype was another one meanwhile, on all threads
    model = Pipeline.from_module(skeleton, schedule, example, **options)
    with _together():
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
    new: Sequence[str] | None = None,
    seed: int = 0,
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
        dtype: of the parameters; by default that which the configuration says, else that of the weights.
        new: modules or parameters that get first values, as `from_config` gives them, whatever the folder has. By
            default those that it lacks of a head, which is what lies outside of the base model, and of a pooler; a
            warning is logged that names them. With () nothing may be missing.
        seed: of what is drawn for them.
        options: more of `Pipeline.from_module`, such as `cuts`, `criterion` and `autocast`.

    What the folder has of another head is not read.

    Raises UsageError for a folder or class that is none, for weights that are missing, left over or of another shape,
    all of which it lists, and as `Pipeline.from_module` does.
    """
    path = Path(folder)
    with _together() as context:
        config = read_config(path, kind) if config is None else config
        kind = model_class(config, kind)
        files = files_in(path)
        blueprint = Blueprint(kind, config, _dtype(dtype, config, files))
        skeleton = blueprint.skeleton()
        _read_generation_config(skeleton, path)
        stored = Stored(skeleton, path, files)
        first = stored.new_names(new, context)
    model = Pipeline.from_module(skeleton, schedule, example, **options)
    with _together():
        make_owned(model)
        stored.read(model, first)
        fill(model, blueprint.initial([name for name in owned_names(model) if name in first], seed))
        model.gradients.prepare()
    return model.eval()


@contextmanager
def _together() -> Iterator[Context]:
    """What all ranks do, and may take long for."""
    context = current_context()
    with context.alarm.raised_everywhere():
        context.alarm.expect_slow()
        yield context


def _dtype(asked: torch.dtype | None, config: Any, files: TensorFiles | None = None) -> torch.dtype:
    found = getattr(config, "dtype", None) if asked is None else asked
    if isinstance(found, str):
        found = getattr(torch, found, found)
    if found is None:
        found = (files and dtype_in(files)) or torch.get_default_dtype()
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise UsageError(f"dtype must be a torch.dtype of floating point, such as torch.bfloat16, got {found!r}")
    return found


def _read_generation_config(skeleton: Any, folder: Path) -> None:
    if (folder / "generation_config.json").is_file() and skeleton.can_generate():
        skeleton.generation_config = library().GenerationConfig.from_pretrained(folder, local_files_only=True)
