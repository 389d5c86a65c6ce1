# Written by `make stubs` from the table of the package.
from pipeflow.colossalai.layers import Classifier1D, Dropout1D, Embedding1D, LayerNorm1D, Linear1D_Col, Linear1D_Row, PatchEmbedding1D, VocabParallelClassifier1D, VocabParallelCrossEntropyLoss1D, VocabParallelEmbedding1D

__all__ = ["Classifier1D", "Dropout1D", "Embedding1D", "LayerNorm1D", "Linear1D_Col", "Linear1D_Row", "PatchEmbedding1D", "VocabParallelClassifier1D", "VocabParallelCrossEntropyLoss1D", "VocabParallelEmbedding1D"]
