"""ColossalAI's `colossalai.nn.layer.parallel_1d`: its names of the layers of `pipeflow.tensor`."""

from __future__ import annotations

from pipeflow.tensor.classifier import Classifier as Classifier1D
from pipeflow.tensor.classifier import VocabParallelClassifier as VocabParallelClassifier1D
from pipeflow.tensor.cross_entropy import VocabParallelCrossEntropy as VocabParallelCrossEntropyLoss1D
from pipeflow.tensor.dropout import Dropout as Dropout1D
from pipeflow.tensor.embedding import HiddenParallelEmbedding as Embedding1D
from pipeflow.tensor.embedding import VocabParallelEmbedding as VocabParallelEmbedding1D
from pipeflow.tensor.linear import ColumnParallelLinear as Linear1D_Col
from pipeflow.tensor.linear import RowParallelLinear as Linear1D_Row
from pipeflow.tensor.norm import LayerNorm as LayerNorm1D
from pipeflow.tensor.patches import PatchEmbedding as PatchEmbedding1D

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
