"""Tensor parallelism: layers of which every rank of a group, or of a grid, holds a part. Names are Megatron's."""

from __future__ import annotations

from pipeflow.engine.tensor.cross_entropy import CrossEntropy, VocabParallelCrossEntropy, vocab_parallel_cross_entropy
from pipeflow.engine.tensor.embedding import HiddenParallelEmbedding, PatchEmbedding, VocabParallelEmbedding
from pipeflow.engine.tensor.experts import divide_experts
from pipeflow.engine.tensor.layer import LayerNorm, cut, divide, feature_parts, group_of
from pipeflow.engine.tensor.linear import Classifier, ColumnParallelLinear, RowParallelLinear, VocabParallelClassifier
from pipeflow.engine.tensor.module_sharding import shard
from pipeflow.engine.tensor.random import (
    Dropout,
    RandomTracker,
    checkpoint,
    current_tracker,
    draw_part_,
    initialize_,
    manual_seed,
    set_tracker,
)
from pipeflow.engine.tensor.regions import (
    all_to_all,
    copy_to_tensor_region,
    gather_from_sequence_region,
    gather_from_tensor_region,
    gather_to_tensor_region,
    reduce_from_tensor_region,
    reduce_scatter_to_sequence_region,
    scatter_to_sequence_region,
    scatter_to_tensor_region,
)
from pipeflow.engine.tensor.rules import DEFAULT_RULES, Rule

__all__ = [
    "DEFAULT_RULES",
    "Classifier",
    "ColumnParallelLinear",
    "CrossEntropy",
    "Dropout",
    "HiddenParallelEmbedding",
    "LayerNorm",
    "PatchEmbedding",
    "RandomTracker",
    "RowParallelLinear",
    "Rule",
    "VocabParallelClassifier",
    "VocabParallelCrossEntropy",
    "VocabParallelEmbedding",
    "all_to_all",
    "checkpoint",
    "copy_to_tensor_region",
    "current_tracker",
    "cut",
    "divide",
    "divide_experts",
    "draw_part_",
    "feature_parts",
    "gather_from_sequence_region",
    "gather_from_tensor_region",
    "gather_to_tensor_region",
    "group_of",
    "initialize_",
    "manual_seed",
    "reduce_from_tensor_region",
    "reduce_scatter_to_sequence_region",
    "scatter_to_sequence_region",
    "scatter_to_tensor_region",
    "set_tracker",
    "shard",
    "vocab_parallel_cross_entropy",
]
