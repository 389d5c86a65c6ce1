# Written by `make stubs` from the table of the package.
from pipeflow.engine.tensor import Classifier as Classifier1D, ColumnParallelLinear as Linear1D_Col, Dropout as Dropout1D, HiddenParallelEmbedding as Embedding1D, LayerNorm as LayerNorm1D, PatchEmbedding as PatchEmbedding1D, RowParallelLinear as Linear1D_Row, VocabParallelClassifier as VocabParallelClassifier1D, VocabParallelCrossEntropy as VocabParallelCrossEntropyLoss1D, VocabParallelEmbedding as VocabParallelEmbedding1D

__all__ = ["Classifier1D", "Dropout1D", "Embedding1D", "LayerNorm1D", "Linear1D_Col", "Linear1D_Row", "PatchEmbedding1D", "VocabParallelClassifier1D", "VocabParallelCrossEntropyLoss1D", "VocabParallelEmbedding1D"]
