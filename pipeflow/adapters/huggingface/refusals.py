"""Arguments of the Trainer that a pipeline does not support, each with what to do instead. They raise errors, because
ignoring one would change the training that the user asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from pipeflow.core.errors import UsageError
from pipeflow.engine.runtime.pipeline import Pipeline
from pipeflow.engine.stages.stage import ModuleStage

_DIVIDES = "pipeflow.launch(pipeline=, tensor=) determines how the model is divided"
_BEFORE = "apply it to the module before it is cut"
_ARGUMENTS = {
    "fsdp": _DIVIDES,
    "deepspeed": _DIVIDES,
    "parallelism_config": _DIVIDES,
    "mp_parameters": _DIVIDES,
    "torch_compile": "it compiles the whole model, but a rank has only a part",
    "torchdynamo": "it compiles the whole model, but a rank has only a part",
    "jit_mode_eval": "it traces the whole model, but a rank has only a part",
    "use_liger_kernel": f"it patches the whole model: {_BEFORE}",
    "neftune_noise_alpha": f"it hooks into the whole model: {_BEFORE}",
    "activation_checkpointing": "call module.gradient_checkpointing_enable() on the module before it is cut",
    "gradient_checkpointing": "call module.gradient_checkpointing_enable() on the module before it is cut",
    "activation_offloading": "let the schedule offload, as with pipeflow.make_schedule(..., offload=)",
    "precompute_ref_log_probs": "ref_model=, a Pipeline, runs before each step",
    "sync_ref_model": "save the model, and start again with it as ref_model=",
    "fp16": "use bf16=True with a Pipeline made with autocast=torch.bfloat16",
    "fp16_full_eval": "evaluation runs in the dtypes of the Pipeline",
    "bf16_full_eval": "evaluation runs in the dtypes of the Pipeline",
    "auto_find_batch_size": "if one rank runs out of memory, all would have to start again: choose a batch size",
    "use_legacy_prediction_loop": "pipelines support only the current evaluation loop",
    "enable_jit_checkpoint": "ranks are told to end at different moments: use save_steps",
    "save_on_each_node": "all ranks write one checkpoint together, to a folder that all of them share",
    "debug": "its hooks need the whole model",
}
_DATA = {"dispatch_batches": None, "even_batches": True, "use_seedable_sampler": True}
_OF_MODELS = ("galore", "apollo", "lomo", "adalomo")


def require_pipeline(model: object) -> Pipeline:
    """`model`, a Pipeline of a cut module. Raises UsageError for anything else."""
    if hasattr(model, "peft_config"):
        raise UsageError(
            "peft was applied to the Pipeline: call peft.get_peft_model(module, config) first, and then "
            "pipeflow.Pipeline.from_module(module, schedule, example)"
        )
    if not isinstance(model, Pipeline):
        raise UsageError(
            f"Trainer takes a pipeflow.Pipeline, got {type(model).__name__}: make one with "
            "pipeflow.Pipeline.from_module(module, schedule, example)"
        )
    if not all(isinstance(chunk, ModuleStage) for chunk in model.chunks):
        raise UsageError(
            "Trainer needs a Pipeline made by from_module or from_pretrained, whose batches are dicts of the forward's "
            "arguments; this Pipeline was made from chunks"
        )
    return model


def require_possible(args: Any, model: Pipeline, options: Mapping[str, Any]) -> None:
    """Raises UsageError that names the first argument that a Trainer of `model` does not support.

    Args:
        args: the TrainingArguments.
        model: the Pipeline.
        options: the Trainer's other arguments by name.
    """
    for name, instead in _ARGUMENTS.items():
        if getattr(args, name, None):
            raise _refused(f"TrainingArguments({name}={getattr(args, name)!r})", instead)
    if args.save_only_model and args.load_best_model_at_end:
        raise _refused("TrainingArguments(save_only_model=True, load_best_model_at_end=True)", "save the state too")
    if options.get("model_init") is not None:
        raise _refused("Trainer(model_init=)", "make the Pipeline first, and a new Trainer for each Pipeline")
    if args.bf16 and model.autocast is not torch.bfloat16:
        raise _refused("TrainingArguments(bf16=True)", "make the Pipeline with autocast=torch.bfloat16 too")
    _require_usual_data(args, model)
    _require_optimizer(args.optim)


def _require_usual_data(args: Any, model: Pipeline) -> None:
    config = args.accelerator_config.to_dict()
    for name, usual in _DATA.items():
        if config.get(name, usual) not in (usual, usual or False):
            raise _refused(f"accelerator_config {name}={config[name]!r}", "every rank reads the data of its replica")
    if config.get("gradient_accumulation_kwargs"):
        raise _refused("accelerator_config gradient_accumulation_kwargs", "set gradient_accumulation_steps")
    if getattr(args, "train_sampling_strategy", "") == "batch_rebalance" and model.context.data_size > 1:
        raise _refused("train_sampling_strategy='batch_rebalance'", "with replicas use 'group_by_length'")


def _require_optimizer(optim: Any) -> None:
    name = str(getattr(optim, "value", optim))
    if name.startswith(_OF_MODELS):
        raise _refused(f"TrainingArguments(optim={name!r})", "it needs the whole model: use 'adamw_torch'")


def _refused(what: str, instead: str) -> UsageError:
    return UsageError(f"{what} is not possible with a pipeline: {instead}")
