"""The module paths of ColossalAI, the names that each of them has, and the modules that define these names."""

from __future__ import annotations

from pipeflow.core.face import Face

NAMES = {
    "": {
        "engines": "initialize",
        "launchers": "get_default_parser, launch, launch_from_openmpi, launch_from_slurm, launch_from_torch",
    },
    "accelerator": {"processes": "get_accelerator"},
    "amp": {"layers": "AMP_TYPE"},
    "booster": {"boosters": "Booster"},
    "booster.booster": {"boosters": "Booster"},
    "booster.plugin": {"plugins": "GeminiPlugin, HybridParallelPlugin, LowLevelZeroPlugin, TorchDDPPlugin"},
    "booster.plugin.dp_plugin_base": {"plugins": "HybridParallelPlugin as DPPluginBase"},
    "booster.plugin.hybrid_parallel_plugin": {"plugins": "HybridParallelPlugin"},
    "builder": {"builders": "build_pipeline_model, build_pipeline_model_from_cfg"},
    "builder.pipeline": {
        "builders": "build_pipeline_model, build_pipeline_model_from_cfg",
        "pipeflow.core.partition": "partition_balanced, partition_uniform",
    },
    "cluster": {"processes": "DistCoordinator, ProcessGroupMesh"},
    "cluster.dist_coordinator": {"processes": "DistCoordinator"},
    "cluster.process_group_mesh": {"processes": "ProcessGroupMesh"},
    "context": {"processes": "ParallelMode", "pipeflow.training": "Config"},
    "context.parallel_mode": {"processes": "ParallelMode"},
    "core": {"processes": "global_context"},
    "engine": {"engines": "Engine"},
    "engine.schedule": {"engines": "InterleavedPipelineSchedule, NonPipelineSchedule, PipelineSchedule"},
    "lazy": {"lazy_init": "LazyInitContext"},
    "lazy.lazy_init": {"lazy_init": "LazyInitContext"},
    "logging": {"pipeflow.training": "DistributedLogger, disable_existing_loggers, get_dist_logger"},
    "nn": {
        "layers": "Classifier, CrossEntropyLoss, Embedding, Linear",
        "pipeflow.engine.tensor": "Dropout, LayerNorm, PatchEmbedding",
        "pipeflow.training.optim": "Lamb",
    },
    "nn.layer.parallel_1d": {
        "pipeflow.engine.tensor": "Classifier as Classifier1D, ColumnParallelLinear as Linear1D_Col, "
        "Dropout as Dropout1D, HiddenParallelEmbedding as Embedding1D, LayerNorm as LayerNorm1D, "
        "PatchEmbedding as PatchEmbedding1D, "
        "RowParallelLinear as Linear1D_Row, VocabParallelClassifier as VocabParallelClassifier1D, "
        "VocabParallelCrossEntropy as VocabParallelCrossEntropyLoss1D, "
        "VocabParallelEmbedding as VocabParallelEmbedding1D",
    },
    "nn.layer.wrapper": {"pipeflow.engine.runtime.gradients.ties": "PipelineSharedModuleWrapper"},
    "nn.lr_scheduler": {
        "layers": "CosineAnnealingLR, ExponentialLR, LambdaLR, MultiStepLR, MultiplicativeLR, OneCycleLR, "
        "PolynomialLR, StepLR",
        "pipeflow.training.optim": "CosineAnnealingWarmupLR, FlatAnnealingLR, FlatAnnealingWarmupLR, LinearWarmupLR, "
        "MultiStepWarmupLR, PolynomialWarmupLR",
    },
    "nn.metric": {"layers": "Accuracy"},
    "nn.optimizer": {"layers": "HybridAdam", "pipeflow.training.optim": "Lamb"},
    "nn.parallel": {"gemini": "GeminiDDP"},
    "pipeline.pipelinable": {"builders": "PipelinableContext, PipelinableModel"},
    "registry": {
        "builders": "DATASETS, HOOKS, LAYERS, LOSSES, MODELS, OPTIMIZERS",
        "pipeflow.training": "Registry",
    },
    "shardformer": {"shard_config": "ShardConfig", "sharders": "ModelSharder, ShardFormer"},
    "shardformer.layer": {
        "shard_layers": "Classifier1D, Dropout1D, Embedding1D, LayerNorm1D, Linear1D_Col, Linear1D_Row, "
        "PatchEmbedding1D, VocabParallelClassifier1D, VocabParallelCrossEntropyLoss1D, VocabParallelEmbedding1D, "
        "gather_forward_split_backward, split_forward_gather_backward",
    },
    "shardformer.modeling.chatglm2_6b.configuration_chatglm": {"chatglm": "ChatGLMConfig"},
    "shardformer.modeling.chatglm2_6b.modeling_chatglm": {"chatglm": "ChatGLMForConditionalGeneration, ChatGLMModel"},
    "shardformer.policies.auto_policy": {"policies": "PolicyLocation, _POLICY_LIST, get_autopolicy, import_policy"},
    "shardformer.policies.base_policy": {
        "policies": "ModulePolicyDescription, Policy, SubModuleReplacementDescription",
    },
    "shardformer.shard": {"shard_config": "ShardConfig", "sharders": "ModelSharder, ShardFormer"},
    "shardformer.shard.shard_config": {"shard_config": "ShardConfig"},
    "shardformer.shard.sharder": {"sharders": "ModelSharder"},
    "shardformer.shard.shardformer": {"sharders": "ShardFormer"},
    "tensor": {
        "tensor_specs": "ColoTensorSpec, ComputePattern, ComputeSpec, ProcessGroup, ReplicaSpec, ShardSpec",
        "tensors": "ColoParameter, ColoTensor",
    },
    "tensor.process_group": {"tensor_specs": "ProcessGroup"},
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

FACE = Face("pipeflow.colossalai", __file__, NAMES)
