"""The module paths of Megatron-LM, the names that each of them has, and the modules that define these names."""

from __future__ import annotations

from pipeflow.core.face import Face

NAMES = {
    "core": {"core": "parallel_state, parallel_state as mpu, tensor_parallel"},
    "core.datasets.blended_megatron_dataset_builder": {"datasets": "BlendedMegatronDatasetBuilder"},
    "core.datasets.gpt_dataset": {"datasets": "GPTDatasetConfig, MockGPTDataset"},
    "core.datasets.utils": {"datasets": "compile_helpers"},
    "core.dist_checkpointing": {"gpt_model": "load, save"},
    "core.distributed": {"schedules": "DistributedDataParallel, DistributedDataParallelConfig"},
    "core.distributed.distributed_data_parallel": {
        "schedules": "DistributedDataParallel, DistributedDataParallelConfig",
    },
    "core.distributed.finalize_model_grads": {"schedules": "finalize_model_grads"},
    "core.models.gpt.gpt_layer_specs": {"gpt_model": "get_gpt_layer_local_spec"},
    "core.models.gpt.gpt_model": {"gpt_model": "GPTModel"},
    "core.parallel_state": {
        "parallel_state": "destroy_model_parallel, get_data_parallel_group, get_data_parallel_rank, "
        "get_data_parallel_world_size, get_pipeline_model_parallel_first_rank, get_pipeline_model_parallel_group, "
        "get_pipeline_model_parallel_last_rank, get_pipeline_model_parallel_rank, "
        "get_pipeline_model_parallel_world_size, get_tensor_model_parallel_group, get_tensor_model_parallel_rank, "
        "get_tensor_model_parallel_src_rank, get_tensor_model_parallel_world_size, "
        "get_virtual_pipeline_model_parallel_rank, get_virtual_pipeline_model_parallel_world_size, "
        "initialize_model_parallel, is_initialized, is_pipeline_first_stage, is_pipeline_last_stage, "
        "model_parallel_is_initialized, set_virtual_pipeline_model_parallel_rank",
    },
    "core.pipeline_parallel": {"schedules": "get_forward_backward_func"},
    "core.pipeline_parallel.schedules": {"schedules": "get_forward_backward_func"},
    "core.tensor_parallel": {
        "tensor_parallel": "ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding, "
        "copy_to_tensor_model_parallel_region, gather_from_sequence_parallel_region, "
        "gather_from_tensor_model_parallel_region, reduce_from_tensor_model_parallel_region, "
        "reduce_scatter_to_sequence_parallel_region, scatter_to_sequence_parallel_region, "
        "scatter_to_tensor_model_parallel_region, vocab_parallel_cross_entropy",
        "parallel_state": "model_parallel_cuda_manual_seed",
    },
    "core.tensor_parallel.cross_entropy": {"tensor_parallel": "vocab_parallel_cross_entropy"},
    "core.tensor_parallel.layers": {
        "tensor_parallel": "ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding",
    },
    "core.tensor_parallel.mappings": {
        "tensor_parallel": "copy_to_tensor_model_parallel_region, gather_from_sequence_parallel_region, "
        "gather_from_tensor_model_parallel_region, reduce_from_tensor_model_parallel_region, "
        "reduce_scatter_to_sequence_parallel_region, scatter_to_sequence_parallel_region, "
        "scatter_to_tensor_model_parallel_region",
    },
    "core.tensor_parallel.random": {"parallel_state": "model_parallel_cuda_manual_seed"},
    "core.transformer.transformer_config": {"tensor_parallel": "TransformerConfig"},
    "training.tokenizer.tokenizer": {"datasets": "_NullTokenizer"},
}

_RANDOM = {
    "CudaRNGStatesTracker": "pipeflow.tensor.RandomTracker",
    "checkpoint": "pipeflow.tensor.checkpoint",
    "get_cuda_rng_tracker": "pipeflow.tensor.Dropout, which draws its own numbers for split tensors",
}
_STEP = "megatron.core.pipeline_parallel.schedules.get_forward_backward_func, which returns the step for the layout"
INSTEAD = {
    "core.enums": "a GPTModel without a ModelType: the layout says which stages it has",
    "core.pipeline_parallel.schedules.forward_backward_no_pipelining": _STEP,
    "core.pipeline_parallel.schedules.forward_backward_pipelining_with_interleaving": _STEP,
    "core.pipeline_parallel.schedules.forward_backward_pipelining_without_interleaving": _STEP,
    **{f"core.tensor_parallel.{name}": instead for name, instead in _RANDOM.items()},
    **{f"core.tensor_parallel.random.{name}": instead for name, instead in _RANDOM.items()},
    "core.transformer.spec_utils": "get_gpt_layer_local_spec of megatron.core.models.gpt.gpt_layer_specs",
}
"""Names of Megatron-LM that no lab uses, with what does the same."""

FACE = Face("pipeflow.megatron", __file__, NAMES, INSTEAD)
