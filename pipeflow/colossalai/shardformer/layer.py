"""ColossalAI's `colossalai.shardformer.layer`: the layers of `pipeflow.tensor`, which are made from stock ones for a
process group of torch.distributed's, too.
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
    """Knows ColossalAI's names of arguments."""

    @classmethod
    def from_native_module(cls, module: Any, group: Any = None, *, process_group: Any = None, **options: Any) -> Self:
        """As of the class in `pipeflow.tensor`. `group`, or `process_group`, is a group of torch.distributed's or of
        pipeflow's, by default the tensor group of the context.
        """
        given = process_group if group is None else group
        own = None if given is None else tensor_group(given)
        named = {_OURS.get(name, name): value for name, value in options.items()}
        made: Self = super().from_native_module(module, own, **named)  # type: ignore[misc]  # of the class beside it
        return made


class Linear1D_Col(_Named, ColumnParallelLinear):  # noqa: N801  # its name there
    """Split by its outputs."""


class Linear1D_Row(_Named, RowParallelLinear):  # noqa: N801  # its name there
    """Split by its inputs."""


class Classifier1D(_Named, Classifier):
    """Split by its inputs, which come whole."""


class VocabParallelClassifier1D(_Named, VocabParallelClassifier):
    """Split by classes."""


class VocabParallelEmbedding1D(_Named, VocabParallelEmbedding):
    """Split by vocabulary."""


class Embedding1D(_Named, HiddenParallelEmbedding):
    """Split by the hidden dimension."""


class PatchEmbedding1D(_Named, PatchEmbedding):
    """Of images."""


class LayerNorm1D(_Named, LayerNorm):
    """Whole on every rank."""


class Dropout1D(_Named, Dropout):
    """That draws alike, or not, on the tensor ranks."""


class VocabParallelCrossEntropyLoss1D(_Named, VocabParallelCrossEntropy):
    """Of logits that are split."""
