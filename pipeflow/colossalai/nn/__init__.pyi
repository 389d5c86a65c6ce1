# Written by `make stubs` from the table of the package.
from pipeflow.colossalai.layers import Classifier, CrossEntropyLoss, Embedding, Linear
from pipeflow.engine.tensor import Dropout, LayerNorm, PatchEmbedding
from pipeflow.training.optim import Lamb

__all__ = ["Classifier", "CrossEntropyLoss", "Dropout", "Embedding", "Lamb", "LayerNorm", "Linear", "PatchEmbedding"]
