"""The module paths of ColossalAI, the names that each of them has, and the modules that define these names."""

from __future__ import annotations

from pipeflow.core.face import Face

NAMES = {
    "": {
        "engines": "initialize",
        "processes": "get_default_parser, launch, launch_from_openmpi, launch_from_slurm, launch_from_torch",
    },
    "accelerator": {"processes": "get_accelerator"},
    "amp": {"layers": "AMP_TYPE"},
    "booster": {"boosters": "Booster"},
    "booster.booster": {"boosters": "Booster"},
    "booster.plugin": {"plugins": "GeminiPlugin, HybridParallelPlugin, LowLevelZeroPlugin, TorchDDPPlugin"},
    "booster.plugin.hybrid_parallel_plugin": {"plugins": "HybridParallelPlugin"},
    "builder": {"layers": "build_pipeline_model, build_pipeline_model_from_cfg"},
    "builder.pipeline": {
        "layers": "build_pipeline_model, build_pipeline_model_from_cfg",
        "pipeflow.core.partition": "partition_balanced, partition_uniform",
    },
    "cluster": {"processes": "DistCoordinator"},
    "cluster.dist_coordinator": {"processes": "DistCoordinator"},
    "context": {"processes": "ParallelMode", "pipeflow.training": "Config"},
    "context.parallel_mode": {"processes": "ParallelMode"},
    "core": {"processes": "global_context"},
    "engine": {"engines": "Engine"},
    "engine.schedule": {"engines": "InterleavedPipelineSchedule, NonPipelineSchedule, PipelineSchedule"},
    "logging": {"pipeflow.training": "DistributedLogger, disable_existing_loggers, get_dist_logger"},
    "nn": {
        "layers": "Classifier, CrossEntropyLoss, Embedding, Linear",
        "pipeflow.engine.tensor": "Dropout, LayerNorm, PatchEmbedding",
        "pipeflow.training.optim": "Lamb",
    },
    "nn.layer.wrapper": {"pipeflow.engine.runtime.gradients.weights": "PipelineSharedModuleWrapper"},
    "nn.lr_scheduler": {
        "pipeflow.training.optim": "CosineAnnealingWarmupLR, FlatAnnealingLR, FlatAnnealingWarmupLR, LinearWarmupLR, "
        "MultiStepWarmupLR, PolynomialWarmupLR",
    },
    "nn.metric": {"layers": "Accuracy"},
    "nn.optimizer": {"layers": "HybridAdam", "pipeflow.training.optim": "Lamb"},
    "nn.parallel": {"gemini": "GeminiDDP"},
    "registry": {"layers": "LAYERS, MODELS", "pipeflow.training": "Registry"},
    "shardformer": {"policies": "ShardConfig", "sharders": "ModelSharder, ShardFormer"},
    "shardformer.layer": {
        "layers": "Classifier1D, Dropout1D, Embedding1D, LayerNorm1D, Linear1D_Col, Linear1D_Row, PatchEmbedding1D, "
        "VocabParallelClassifier1D, VocabParallelCrossEntropyLoss1D, VocabParallelEmbedding1D",
    },
    "shardformer.modeling.chatglm2_6b.configuration_chatglm": {"chatglm": "ChatGLMConfig"},
    "shardformer.modeling.chatglm2_6b.modeling_chatglm": {"chatglm": "ChatGLMForConditionalGeneration, ChatGLMModel"},
    "shardformer.policies.base_policy": {
        "policies": "ModulePolicyDescription, Policy, SubModuleReplacementDescription",
    },
    "shardformer.shard": {"policies": "ShardConfig", "sharders": "ModelSharder, ShardFormer"},
    "shardformer.shard.shard_config": {"policies": "ShardConfig"},
    "shardformer.shard.sharder": {"sharders": "ModelSharder"},
    "shardformer.shard.shardformer": {"sharders": "ShardFormer"},
    "tensor": {
        "tensors": "ColoParameter, ColoTensor, ColoTensorSpec, ComputePattern, ComputeSpec, ProcessGroup, ReplicaSpec, "
        "ShardSpec",
    },
    "tensor.process_group": {"tensors": "ProcessGroup"},
    "trainer": {"trainers": "Trainer", "trainer": "hooks"},
    "trainer.hooks": {
        "trainers": "BaseHook",
        "hooks": "AccuracyHook, LRSchedulerHook, LogMemoryByEpochHook, LogMetricByEpochHook, LogMetricByStepHook, "
        "LogTimingByEpochHook, LossHook, SaveCheckpointHook, TensorboardHook, ThroughputHook",
    },
    "utils": {
        "processes": "get_current_device, is_using_pp",
        "pipeflow.training": "MultiTimer, get_dataloader",
    },
    "utils.model.colo_init_context": {"gemini": "ColoInitContext"},
    "utils.timer": {"pipeflow.training": "MultiTimer, Timer"},
}

_RATES = ("CosineAnnealing", "Exponential", "Lambda", "MultiStep", "Multiplicative", "OneCycle", "Step")
INSTEAD = {
    "booster.plugin.dp_plugin_base": "colossalai.booster.plugin.HybridParallelPlugin",
    "cluster.ProcessGroupMesh": "torch.distributed.device_mesh.init_device_mesh",
    "cluster.process_group_mesh": "torch.distributed.device_mesh.init_device_mesh",
    "lazy": "from_config or from_pretrained of pipeflow's huggingface, with which a rank makes only its own parameters",
    "nn.layer.parallel_1d": "colossalai.shardformer.layer",
    **{f"nn.lr_scheduler.{name}LR": f"torch.optim.lr_scheduler.{name}LR, with torch's arguments" for name in _RATES},
    "nn.lr_scheduler.PolynomialLR": "colossalai.nn.lr_scheduler.PolynomialWarmupLR with warmup_steps=0",
    "pipeline": "pipeflow.build_stages, or pipeflow.Pipeline.from_module with cuts=",
    **{f"registry.{name}": "pipeflow.training.Registry" for name in ("DATASETS", "HOOKS", "LOSSES", "OPTIMIZERS")},
    "shardformer.layer.gather_forward_split_backward": "pipeflow.tensor.gather_from_sequence_region",
    "shardformer.layer.split_forward_gather_backward": "pipeflow.tensor.scatter_to_sequence_region",
    "shardformer.policies.auto_policy": "custom_policy= of HybridParallelPlugin, or policy= of ShardFormer.optimize",
}
"""Names of ColossalAI that no tutorial uses, with what does the same."""

FACE = Face("pipeflow.colossalai", __file__, NAMES, INSTEAD)
