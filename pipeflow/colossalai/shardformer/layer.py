"""ColossalAI's `colossalai.shardformer.layer`: layers of `pipeflow.tensor`, which can be made from torch's layers for
a process group of torch.distributed.
"""

from __future__ import annotations

from typing import Any, Self

from pipeflow.colossalai.layout import tensor_group
from pipeflow.tensor import (
    Classifier,
    ColumnParallelLinear,
    Dropout,
    HiddenParallelEmbedding,
    LayerNorm,
    PatchEmbedding,
    RowParallelLinear,
    VocabParallelClassifier,
    VocabParallelCrossEntropy,
    VocabParallelEmbedding,
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
_OURS = {"parallel_input": "input_is_parallel"}


class _Named:
    """A mixin with ColossalAI's names of arguments."""

    @classmethod
    def from_native_module(cls, module: Any, group: Any = None, *, process_group: Any = None, **options: Any) -> Self:
        """Like the method of the class in `pipeflow.tensor`. `group` or `process_group` is a group of torch.distributed
        or of pipeflow; by default the context's tensor group.
        """
        given = process_group if group is None else group
        own = None if given is None else tensor_group(given)
        named = {_OURS.get(name, name): value for name, value in options.items()}
        made: Self = super().from_native_module(module, own, **named)  # type: ignore[misc]  # of the class beside it
        return made


class Linear1D_Col(_Named, ColumnParallelLinear):  # noqa: N801  # its name there
    """A linear layer, split by outputs."""


class Linear1D_Row(_Named, RowParallelLinear):  # noqa: N801  # its name there
    """A linear layer, split by inputs."""


class Classifier1D(_Named, Classifier):
    """A classifier, split by inputs, which it gets whole."""


class VocabParallelClassifier1D(_Named, VocabParallelClassifier):
    """A classifier, split by classes."""


class VocabParallelEmbedding1D(_Named, VocabParallelEmbedding):
    """An embedding, split by vocabulary."""


class Embedding1D(_Named, HiddenParallelEmbedding):
    """An embedding, split by the hidden dimension."""


class PatchEmbedding1D(_Named, PatchEmbedding):
    """An embedding of image patches."""


class LayerNorm1D(_Named, LayerNorm):
    """A layer norm, whole on every rank."""


class Dropout1D(_Named, Dropout):
    """Dropout with the same or with different masks on the tensor ranks."""


class VocabParallelCrossEntropyLoss1D(_Named, VocabParallelCrossEntropy):
    """Cross-entropy of split logits."""
