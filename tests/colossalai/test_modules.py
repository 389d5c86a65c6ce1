"""`colossalai.x` is `pipeflow.colossalai.x`: the module trees are the same, and each name is one of pipeflow's own."""

from __future__ import annotations

import ast
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch

import pipeflow.colossalai
from pipeflow.colossalai.amp import AMP_TYPE
from pipeflow.colossalai.registry import DATASETS, HOOKS, LOSSES, OPTIMIZERS
from pipeflow.colossalai.trainer import hooks
from pipeflow.colossalai.utils import get_current_device, is_using_pp
from pipeflow.core.errors import UsageError
from pipeflow.optim import HalfPrecision
from pipeflow.parallel.context import current_context
from pipeflow.testing import run_threads
from pipeflow.training import read_config

ROOT = Path(pipeflow.colossalai.__file__).parent
ONE_DIMENSIONAL = {
    "Linear1D_Col": "pipeflow.tensor.ColumnParallelLinear",
    "Linear1D_Row": "pipeflow.tensor.RowParallelLinear",
    "VocabParallelEmbedding1D": "pipeflow.tensor.VocabParallelEmbedding",
    "Embedding1D": "pipeflow.tensor.HiddenParallelEmbedding",
    "PatchEmbedding1D": "pipeflow.tensor.PatchEmbedding",
    "Classifier1D": "pipeflow.tensor.Classifier",
    "VocabParallelClassifier1D": "pipeflow.tensor.VocabParallelClassifier",
    "LayerNorm1D": "pipeflow.tensor.LayerNorm",
    "Dropout1D": "pipeflow.tensor.Dropout",
    "VocabParallelCrossEntropyLoss1D": "pipeflow.tensor.VocabParallelCrossEntropy",
}
SCHEDULES = (
    "CosineAnnealingWarmupLR",
    "FlatAnnealingLR",
    "FlatAnnealingWarmupLR",
    "LinearWarmupLR",
    "MultiStepWarmupLR",
    "PolynomialWarmupLR",
)
OURS = {  # by module: each name, and what it is here
    "builder.pipeline": {
        "partition_uniform": "pipeflow.partition_uniform",
        "partition_balanced": "pipeflow.partition_balanced",
    },
    "context": {"Config": "pipeflow.training.Config"},
    "logging": {
        "disable_existing_loggers": "pipeflow.training.disable_existing_loggers",
        "get_dist_logger": "pipeflow.training.get_dist_logger",
    },
    "nn": {
        **{name: f"pipeflow.tensor.{name}" for name in ("LayerNorm", "PatchEmbedding", "Dropout")},
        "Lamb": "pipeflow.optim.Lamb",
    },
    "nn.layer.parallel_1d": ONE_DIMENSIONAL,
    "nn.layer.wrapper": {"PipelineSharedModuleWrapper": "pipeflow.PipelineSharedModuleWrapper"},
    "nn.lr_scheduler": {name: f"pipeflow.optim.{name}" for name in SCHEDULES},
    "nn.optimizer": {"Lamb": "pipeflow.optim.Lamb"},
    "registry": {"Registry": "pipeflow.training.Registry"},
    "utils": {"get_dataloader": "pipeflow.get_dataloader", "MultiTimer": "pipeflow.training.MultiTimer"},
    "utils.timer": {"MultiTimer": "pipeflow.training.MultiTimer", "Timer": "pipeflow.training.Timer"},
}
ADAPTERS = {
    "": ("get_default_parser", "initialize", "launch", "launch_from_openmpi", "launch_from_slurm", "launch_from_torch"),
    "accelerator": ("get_accelerator",),
    "amp": ("AMP_TYPE",),
    "builder": ("build_pipeline_model", "build_pipeline_model_from_cfg"),
    "builder.pipeline": ("build_pipeline_model", "build_pipeline_model_from_cfg"),
    "context": ("ParallelMode",),
    "context.parallel_mode": ("ParallelMode",),
    "core": ("global_context",),
    "engine": ("Engine",),
    "engine.schedule": ("InterleavedPipelineSchedule", "NonPipelineSchedule", "PipelineSchedule"),
    "registry": ("LAYERS", "MODELS"),
    "shardformer.layer": tuple(ONE_DIMENSIONAL),
    "shardformer": ("ModelSharder", "ShardConfig", "ShardFormer"),
    "shardformer.shard": ("ModelSharder", "ShardConfig", "ShardFormer"),
    "shardformer.policies.base_policy": ("ModulePolicyDescription", "Policy", "SubModuleReplacementDescription"),
    "booster": ("Booster",),
    "booster.plugin": ("GeminiPlugin", "HybridParallelPlugin", "LowLevelZeroPlugin", "TorchDDPPlugin"),
    "booster.plugin.dp_plugin_base": ("DPPluginBase",),
    "nn.metric": ("Accuracy",),
    "trainer": ("Trainer", "hooks"),
    "trainer.hooks": (
        *("AccuracyHook", "BaseHook", "LRSchedulerHook", "LossHook", "TensorboardHook", "ThroughputHook"),
        *("LogMemoryByEpochHook", "LogMetricByEpochHook", "LogMetricByStepHook", "LogTimingByEpochHook"),
        "SaveCheckpointHook",
    ),
    "nn.parallel": ("GeminiDDP",),
    "tensor": (
        *("ColoParameter", "ColoTensor", "ColoTensorSpec", "ComputePattern", "ComputeSpec", "ProcessGroup"),
        *("ReplicaSpec", "ShardSpec"),
    ),
    "utils.model.colo_init_context": ("ColoInitContext",),
    "nn": ("Classifier", "CrossEntropyLoss", "Embedding", "Linear"),
    "utils": ("get_current_device", "is_using_pp"),
}


def named(path: str) -> object:
    module, _, name = path.rpartition(".")
    return getattr(import_module(module), name)


@pytest.mark.parametrize("module", OURS)
def test_a_name_is_one_of_ours(module: str) -> None:
    for name, path in OURS[module].items():
        assert named(f"pipeflow.colossalai.{module}.{name}") is named(path)


@pytest.mark.parametrize("module", ADAPTERS)
def test_adapters_are_where_the_tutorials_look(module: str) -> None:
    for name in ADAPTERS[module]:
        assert named(".".join(filter(None, ["pipeflow.colossalai", module, name])))


def test_a_face_is_thin() -> None:
    """Longer code belongs to the packages below; only tensors like ColoTensor exist nowhere else."""
    for path in set(ROOT.rglob("*.py")) - set(ROOT.glob("tensor/*.py")):
        assert lines_of_code(path.read_text()) <= 100, path


def lines_of_code(source: str) -> int:
    """The number of lines outside of docstrings."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, documented) and ast.get_docstring(node)]
    docstrings = [node.body[0] for node in nodes]
    return len(source.splitlines()) - sum((each.end_lineno or 0) - each.lineno + 1 for each in docstrings)


@pytest.mark.slow
def test_no_other_package_is_needed() -> None:
    """For the names of both libraries, except for ChatGLM, whose classes are those of transformers."""
    optional = ("transformers", "peft", "safetensors", "tensorboard", "torchvision", "timm")
    source = f"""
import sys
sys.modules.update(dict.fromkeys({optional!r}))
from importlib import import_module
from pkgutil import walk_packages
import pipeflow.colossalai, pipeflow.megatron
for package in (pipeflow.colossalai, pipeflow.megatron):
    for module in walk_packages(package.__path__, package.__name__ + "."):
        if "chatglm2_6b." not in module.name and not module.name.endswith("__main__"):
            import_module(module.name)
try:
    import pipeflow.colossalai.shardformer.modeling.chatglm2_6b.modeling_chatglm
except pipeflow.UsageError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "this needs the package transformers: pip install" in done.stdout


def test_questions_about_this_process() -> None:
    assert run_threads(is_using_pp, 2) == [True, True]
    assert run_threads(is_using_pp, 2, tensor=2) == [False, False]
    assert run_threads(lambda: get_current_device() == current_context().device, 1) == [True]
    with pytest.raises(UsageError, match="there is no context"):
        get_current_device()


def test_precisions_are_ours_under_their_names() -> None:
    assert read_config({"fp16": {"mode": AMP_TYPE.NAIVE}}).precision == HalfPrecision("parameters", torch.float16)
    assert read_config({"bf16": {"mode": AMP_TYPE.TORCH}}).precision == HalfPrecision("autocast", torch.bfloat16)
    with pytest.raises(UsageError, match="must be 'parameters' or 'autocast', got"):
        read_config({"fp16": {"mode": AMP_TYPE.APEX}})


def test_registries() -> None:
    """Of classes by name: one's own, and those of the libraries that a registry has."""
    assert LOSSES.get_module("CrossEntropyLoss") is torch.nn.CrossEntropyLoss
    assert OPTIMIZERS.get_module("AdamW") is torch.optim.AdamW
    assert HOOKS.get_module("LossHook") is hooks.LossHook
    for registry in (DATASETS, HOOKS, LOSSES, OPTIMIZERS):

        @registry.register_module
        class Own: ...

        assert registry.get_module("Own") is Own
        with pytest.raises(UsageError, match=rf"{registry.name} has no 'Owm': did you mean 'Own'\?"):
            registry.get_module("Owm")
        del registry._modules["Own"]
