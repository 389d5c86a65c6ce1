"""The layers under the names that ColossalAI's tutorials use, as `from pipeflow.colossalai import nn as col_nn`. Which
layer a name stands for follows from its arguments alone, never from what was made before.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from pipeflow.core.errors import UsageError
from pipeflow.parallel.transport.group import Alone, Group
from pipeflow.tensor.classifier import Classifier as RowClassifier
from pipeflow.tensor.classifier import VocabParallelClassifier
from pipeflow.tensor.cross_entropy import Reduction, vocab_parallel_cross_entropy
from pipeflow.tensor.dropout import Dropout
from pipeflow.tensor.embedding import HiddenParallelEmbedding, VocabParallelEmbedding
from pipeflow.tensor.layer import TensorLayer
from pipeflow.tensor.linear import ColumnParallelLinear, RowParallelLinear
from pipeflow.tensor.norm import LayerNorm
from pipeflow.tensor.patches import PatchEmbedding

__all__ = ["Classifier", "CrossEntropyLoss", "Dropout", "Embedding", "LayerNorm", "Linear", "PatchEmbedding"]

VOCAB_PARALLEL_LIMIT = 2048  # up to so many embeddings or classes a vocabulary is not split


def Linear(  # noqa: N802 (the name of a layer)
    in_features: int, out_features: int, bias: bool = True, *, input_is_parallel: bool = False, **options: Any
) -> ColumnParallelLinear | RowParallelLinear:
    """A RowParallelLinear where the input is split, as after a Linear; else a ColumnParallelLinear, which splits its
    output unless `gather_output=True`. Further options are that layer's.
    """
    if not input_is_parallel:
        return ColumnParallelLinear(in_features, out_features, bias, **options)
    if options.pop("gather_output", False):
        raise UsageError("Linear with input_is_parallel=True gives a whole output already: leave gather_output out")
    return RowParallelLinear(in_features, out_features, bias, **options)


def Embedding(  # noqa: N802
    num_embeddings: int,
    embedding_dim: int,
    padding_idx: int | None = None,
    *,
    vocab_parallel_limit: int = VOCAB_PARALLEL_LIMIT,
    **options: Any,
) -> VocabParallelEmbedding | HiddenParallelEmbedding:
    """A VocabParallelEmbedding for more embeddings than the limit, else a HiddenParallelEmbedding."""
    layer = VocabParallelEmbedding if num_embeddings > vocab_parallel_limit else HiddenParallelEmbedding
    return layer(num_embeddings, embedding_dim, padding_idx, **options)


def Classifier(  # noqa: N802
    in_features: int,
    num_classes: int,
    bias: bool = True,
    *,
    vocab_parallel_limit: int = VOCAB_PARALLEL_LIMIT,
    **options: Any,
) -> VocabParallelClassifier | RowClassifier:
    """A VocabParallelClassifier for more classes than the limit, whose logits are split unless `gather_output=True`;
    else a Classifier, whose logits are whole.
    """
    layer = VocabParallelClassifier if num_classes > vocab_parallel_limit else RowClassifier
    return layer(in_features, num_classes, bias, **options)


class CrossEntropyLoss(TensorLayer):
    """nn.CrossEntropyLoss of logits that are whole or split over the vocabulary: the last dimension are the classes.

    Args:
        num_classes: logits of so many columns are whole, of ceil(num_classes / T) split; anything else is refused.
            Without it logits are taken as whole.
        group: by default the tensor group of the context, and without a launch the group of one.

    Raises UsageError for logits of another size, and for labels as `vocab_parallel_cross_entropy`.
    """

    def __init__(
        self,
        *,
        num_classes: int | None = None,
        label_smoothing: float = 0.0,
        ignore_index: int = -100,
        reduction: Reduction = "mean",
        group: Group | None = None,
    ) -> None:
        super().__init__()
        self.join(group)
        self.num_classes = num_classes
        self.options: dict[str, Any] = {
            "label_smoothing": label_smoothing,
            "ignore_index": ignore_index,
            "reduction": reduction,
        }

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        columns = logits.shape[-1]
        if self.num_classes is None or columns == self.num_classes:
            return vocab_parallel_cross_entropy(logits, labels, group=Alone(), **self.options)
        return vocab_parallel_cross_entropy(
            logits, labels, vocab_size=self.num_classes, group=self.group, **self.options
        )

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in {"num_classes": self.num_classes, **self.options}.items())
