"""ColossalAI's `colossalai.nn`, in tutorials `from colossalai import nn as col_nn`. The layer that a name stands for
depends only on its arguments, never on layers made before.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from pipeflow.core.errors import UsageError
from pipeflow.tensor.classifier import Classifier as RowClassifier
from pipeflow.tensor.classifier import VocabParallelClassifier
from pipeflow.tensor.cross_entropy import CrossEntropy
from pipeflow.tensor.embedding import HiddenParallelEmbedding, VocabParallelEmbedding
from pipeflow.tensor.linear import ColumnParallelLinear, RowParallelLinear

VOCAB_PARALLEL_LIMIT = 2048  # a vocabulary with up to this number of embeddings or classes is not split


def Linear(  # noqa: N802  # its name there
    in_features: int, out_features: int, bias: bool = True, *, input_is_parallel: bool = False, **options: Any
) -> ColumnParallelLinear | RowParallelLinear:
    """Makes a ColumnParallelLinear, which splits its output unless `gather_output=True`; or, with
    `input_is_parallel=True`, a RowParallelLinear, whose input is split, as after a Linear. `options` are that layer's.
    """
    if not input_is_parallel:
        return ColumnParallelLinear(in_features, out_features, bias, **options)
    if options.pop("gather_output", False):
        raise UsageError("Linear with input_is_parallel=True already returns a whole output: remove gather_output")
    return RowParallelLinear(in_features, out_features, bias, **options)


def Embedding(  # noqa: N802  # its name there
    num_embeddings: int,
    embedding_dim: int,
    padding_idx: int | None = None,
    *,
    vocab_parallel_limit: int = VOCAB_PARALLEL_LIMIT,
    **options: Any,
) -> VocabParallelEmbedding | HiddenParallelEmbedding:
    """Makes a VocabParallelEmbedding for more embeddings than the limit, else a HiddenParallelEmbedding."""
    layer = VocabParallelEmbedding if num_embeddings > vocab_parallel_limit else HiddenParallelEmbedding
    return layer(num_embeddings, embedding_dim, padding_idx, **options)


def Classifier(  # noqa: N802  # its name there
    in_features: int,
    num_classes: int,
    bias: bool = True,
    *,
    vocab_parallel_limit: int = VOCAB_PARALLEL_LIMIT,
    **options: Any,
) -> VocabParallelClassifier | RowClassifier:
    """Makes a VocabParallelClassifier for more classes than the limit, with split logits unless `gather_output=True`;
    else a Classifier, with whole logits.
    """
    layer = VocabParallelClassifier if num_classes > vocab_parallel_limit else RowClassifier
    return layer(in_features, num_classes, bias, **options)


def CrossEntropyLoss(*, num_classes: int | None = None, **options: Any) -> CrossEntropy:  # noqa: N802  # its name there
    """Makes a CrossEntropy of logits that are whole, or split over `num_classes`. `options` are that layer's."""
    return CrossEntropy(vocab_size=num_classes, **options)


class Accuracy(nn.Module):
    """Number of samples in a batch whose label has the largest score, an integer scalar."""

    def forward(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Takes whole logits [batch, classes] as `outputs`, and `labels` [batch]."""
        return (outputs.argmax(-1) == labels.to(outputs.device)).sum()
