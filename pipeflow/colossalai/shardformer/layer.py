"""ColossalAI's `colossalai.shardformer.layer`: the layers of tensor parallelism in one dimension."""

from __future__ import annotations

from pipeflow.colossalai.nn.layer.parallel_1d import (
    Classifier1D,
    Dropout1D,
    Embedding1D,
    LayerNorm1D,
    Linear1D_Col,
    Linear1D_Row,
    PatchEmbedding1D,
    VocabParallelClassifier1D,
    VocabParallelCrossEntropyLoss1D,
    VocabParallelEmbedding1D,
)

__all__ = [
    "Classifier1D",
    "Dropout1D",
    "Embedding1D",
    "LayerNorm1D",
    "Linear1D_Col",
    "Linear1D_Row",
    "PatchEmbedding1D",
    "VocabParallelClassifier1D",
    "VocabParallelCrossEntropyLoss1D",
    "VocabParallelEmbedding1D",
]
