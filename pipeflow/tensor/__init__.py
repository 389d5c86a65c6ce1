"""Tensor parallelism in one dimension: layers of which every rank of a group holds a part. Names are Megatron's."""

from __future__ import annotations

from pipeflow.tensor.classifier import Classifier, VocabParallelClassifier
from pipeflow.tensor.cross_entropy import CrossEntropy, VocabParallelCrossEntropy, vocab_parallel_cross_entropy
from pipeflow.tensor.division import cut, divide
from pipeflow.tensor.dropout import Dropout
from pipeflow.tensor.embedding import HiddenParallelEmbedding, VocabParallelEmbedding
from pipeflow.tensor.initialize import draw_part_, initialize_
from pipeflow.tensor.layer import group_of
from pipeflow.tensor.linear import ColumnParallelLinear, RowParallelLinear
from pipeflow.tensor.module_sharding import shard
from pipeflow.tensor.norm import LayerNorm
from pipeflow.tensor.patches import PatchEmbedding
from pipeflow.tensor.random import RandomTracker, current_tracker, manual_seed, set_tracker
from pipeflow.tensor.recompute import checkpoint
from pipeflow.tensor.regions import (
    copy_to_tensor_region,
    gather_from_sequence_region,
    gather_from_tensor_region,
    gather_to_tensor_region,
    reduce_from_tensor_region,
    reduce_scatter_to_sequence_region,
    scatter_to_sequence_region,
    scatter_to_tensor_region,
)
from pipeflow.tensor.rules import Rule
from pipeflow.tensor.table import DEFAULT_RULES

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
    "checkpoint",
    "copy_to_tensor_region",
    "current_tracker",
    "cut",
    "divide",
    "draw_part_",
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
