"""from_config, from_pretrained and save_pretrained: Pipelines of transformers models with initial weights or those of a
folder, which is written, too, so that transformers reads it. Each rank creates, loads and saves only its own weights.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from pipeflow.adapters.huggingface.classes import Kind, Model, example_for, model_class, read_config
from pipeflow.adapters.huggingface.keys import targets_of
from pipeflow.adapters.huggingface.owned_weights import StoredWeights, dtype_in, files_in, fill, make_owned
from pipeflow.adapters.huggingface.peft_adapters import add_adapters, is_adapted, save_adapters
from pipeflow.adapters.huggingface.shared_tokens import share_tokens
from pipeflow.adapters.huggingface.skeleton import Blueprint
from pipeflow.adapters.libraries import transformers_library
from pipeflow.core.errors import UsageError
from pipeflow.core.schedule import Schedule
from pipeflow.engine.parallel.context import Context, current_context
from pipeflow.engine.parallel.transport.agreement import all_gather
from pipeflow.engine.runtime.pipeline import Pipeline
from pipeflow.engine.stages.stage import ModuleStage
from pipeflow.training.checkpoint.pieces import local_tensors
from pipeflow.training.checkpoint.tensor_files import OutputTensor, TensorFiles, write_together

_OF_DOWNLOADS = {"cache_dir", "force_download", "local_files_only", "revision", "token", "use_auth_token"}
_OF_LOADING = {"from_flax", "from_tf", "ignore_mismatched_sizes", "low_cpu_mem_usage", "subfolder", "trust_remote_code"}


def from_config(
    config: Any,
    schedule: Schedule,
    example: object = None,
    *,
    kind: Kind = None,
    dtype: torch.dtype | None = None,
    seed: int = 0,
    **options: Any,
) -> Model:
    """Makes a Pipeline of a transformers model with the initial weights of its class. Each rank creates only the
    weights of its own stages. Random weights depend only on `seed` and the parameter's name, so they are the same under
    every schedule and layout. The model is in training mode.

    Args:
        config: the model's configuration, a transformers.PreTrainedConfig.
        schedule: as in `Pipeline`.
        example: as in `Pipeline.from_module`. By default, for models of text and images, a batch of short
            sequences with labels.
        kind: the model's class, an auto class such as transformers.AutoModelForCausalLM, or the name of one; by default
            the first of `config.architectures`.
        dtype: dtype of the parameters; by default the one in `config`, else torch's default.
        seed: seed of the random weights.
        options: further arguments of `Pipeline.from_module`, such as `cuts`, `criterion` and `autocast`.

    Raises UsageError for an unknown class, and as `Pipeline.from_module` does.
    """
    with _together() as context:
        blueprint = Blueprint(model_class(config, kind), config, _dtype(dtype, config))
        skeleton = blueprint.skeleton().train()
        shares = _shared(skeleton, schedule, context)
        all_gather(context.world, [0.0])  # torch's default dtype, which all threads share, was changed meanwhile
    example = example_for(skeleton, schedule.num_microbatches, shares=shares) if example is None else example
    model = Model.from_module(skeleton, schedule, example, **options)
    with _together():
        make_owned(model)
        fill(model, blueprint.initial(dict(model.named_parameters()), seed))
        model.gradients.prepare()
    return model


def from_pretrained(
    folder: str | os.PathLike[str],
    schedule: Schedule,
    example: object = None,
    *,
    kind: Kind = None,
    config: Any = None,
    dtype: torch.dtype | None = None,
    new: Sequence[str] | None = None,
    adapters: Any = None,
    seed: int = 0,
    **options: Any,
) -> Model:
    """Makes a Pipeline of a transformers model with the weights in a folder of safetensors files. Each rank creates and
    loads only the weights of its own stages, and only its part of weights that are split over tensor ranks. As in
    transformers, the model is in evaluation mode: call `model.train()` to train it with dropout.

    Args:
        folder: folder written by `save_pretrained` of transformers or of pipeflow, on storage that all ranks share.
        schedule: as in `Pipeline`.
        example: as in `Pipeline.from_module`. By default, for models of text and images, a batch of short
            sequences with labels.
        kind: the model's class, an auto class such as transformers.AutoModelForCausalLM, or the name of one; by default
            the class that `config.json` names.
        config: the configuration; by default the folder's.
        dtype: dtype of the parameters; by default the one in the configuration, else that of the weights.
        new: names of modules or parameters that get initial weights, as from `from_config`, even if the folder has
            them. By default the missing weights of a head (everything outside the base model) or a pooler; a warning
            names them. With () no weight may be missing.
        adapters: a configuration of peft, such as peft.LoraConfig, for new adapters, or the folder of saved ones. Only
            they are trained, and saved by `save_pretrained`. New ones are those that `peft.get_peft_model` makes after
            `torch.manual_seed(seed)`.
        seed: seed of initial weights and adapters.
        options: further arguments of `Pipeline.from_module`, such as `cuts`, `criterion` and `autocast`. Arguments of
            transformers that only concern downloads, such as `revision` and `token`, are ignored, since nothing is
            downloaded; so are transformers' other ones that are False or None.

    Weights of another head in the folder are ignored.

    Raises UsageError if the folder or class is unknown, if weights are missing, left over or of another shape (all are
    listed), if peft cannot add the adapters before the weights are loaded, and as `Pipeline.from_module` does.
    """
    path = Path(folder)
    options = {name: each for name, each in options.items() if not _is_idle(name, each)}
    with _together() as context:
        config = read_config(path, kind) if config is None else config
        kind = model_class(config, kind)
        files = files_in(path)
        blueprint = Blueprint(kind, config, _dtype(dtype, config, files))
        skeleton = blueprint.skeleton()
        shares = _shared(skeleton, schedule, context)
        _read_generation_config(skeleton, path)
        stored = StoredWeights(skeleton, path, files)
        first = stored.new_names(new, context)
    example = example_for(skeleton, schedule.num_microbatches, shares=shares) if example is None else example
    with _together():
        adapted = None if adapters is None else add_adapters(skeleton, adapters, seed)
    model = Model.from_module(skeleton if adapted is None else adapted.root, schedule, example, **options)
    with _together():
        make_owned(model)
        for names in (None,) if adapted is None else (adapted.weights, adapted.copies):
            stored.read(model, names, first)
            owned = [
                (name, name if names is None else names.get(name, [""])[0]) for name, _ in model.named_parameters()
            ]
            values = blueprint.initial([name for _, name in owned if name in first], seed)
            fill(model, {own: values[name] for own, name in owned if name in values})
        model.gradients.prepare()
    return model.eval()


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
    with _together(model.context) as context:
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
        outputs = [OutputTensor(each, *targets[each.name]) for each in tensors]

        def beside(part: Path) -> None:
            config.save_pretrained(part)
            if root.can_generate() and root.generation_config is not None:
                root.generation_config.save_pretrained(part)

        for name in ("config.json", "generation_config.json"):
            if not _is_free(Path(folder, name)):
                raise UsageError(f"{Path(folder, name)} was not written by transformers: save to a new folder")
        write_together(Path(folder), outputs, context, shard_bytes=shard_bytes, beside=beside)


@contextmanager
def _together(context: Context | None = None) -> Iterator[Context]:
    """The context, by default the current one, for work that all ranks do together and that may take long."""
    context = context or current_context()
    with context.alarm.raised_everywhere():
        context.alarm.expect_slow()
        yield context


def _shared(skeleton: Any, schedule: Schedule, context: Context) -> int:
    """Makes a model ready for context ranks or slices, if there are any. Returns of how many tokens a sequence must
    have a multiple; 0 if tokens are not shared.
    """
    if context.context_size == schedule.slices == 1:
        return 0
    share_tokens(skeleton)
    return 2 * context.context_size


def _is_idle(name: str, value: object) -> bool:
    """True for an argument of transformers' from_pretrained that changes nothing for a folder on this machine."""
    return name in _OF_DOWNLOADS or (name in _OF_LOADING and not value)


def _dtype(asked: torch.dtype | None, config: Any, files: TensorFiles | None = None) -> torch.dtype:
    found = getattr(config, "dtype", None) if asked is None else asked
    if isinstance(found, str):
        found = getattr(torch, found, found)
    if found is None:
        found = (files and dtype_in(files)) or torch.get_default_dtype()
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise UsageError(f"dtype must be a floating-point torch.dtype, such as torch.bfloat16, got {found!r}")
    return found


def _read_generation_config(skeleton: Any, folder: Path) -> None:
    if (folder / "generation_config.json").is_file() and skeleton.can_generate():
        skeleton.generation_config = transformers_library().GenerationConfig.from_pretrained(
            folder, local_files_only=True
        )


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
