"""ColossalAI's `colossalai.shardformer.layer`: layers of `pipeflow.tensor`, which can be made from torch's layers for
a process group of torch.distributed.
"""

from __future__ import annotations

from typing import Any, Self

from torch import Tensor

from pipeflow.colossalai.processes import tensor_group
from pipeflow.colossalai.shard_config import mode_of
from pipeflow.core.errors import UsageError
from pipeflow.engine.tensor import (
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
from pipeflow.engine.tensor.regions import gather_from_sequence_region, scatter_to_sequence_region

_OURS = {"parallel_input": "input_is_parallel", "sp_partial_derived": "sequence_parallel"}


class _Named:
    """A mixin with ColossalAI's names of arguments."""

    @classmethod
    def from_native_module(cls, module: Any, group: Any = None, *, process_group: Any = None, **options: Any) -> Self:
        """Like the method of the class in `pipeflow.tensor`. `group` or `process_group` is a group of torch.distributed
        or of pipeflow; by default the context's tensor group. `seq_parallel_mode="split_gather"`, and
        `sp_partial_derived=True` of a norm, mean `sequence_parallel=True`.

        Raises UsageError for other modes, and as that class does.
        """
        if (mode := options.pop("seq_parallel_mode", None)) is not None:
            options["sequence_parallel"] = mode_of(mode, is_enabled=True, overlaps=False) is not None
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
    """A linear classifier whose classes are split over the tensor ranks."""


class VocabParallelEmbedding1D(_Named, VocabParallelEmbedding):
    """An embedding whose vocabulary is split over the tensor ranks."""


class Embedding1D(_Named, HiddenParallelEmbedding):
    """An embedding, split by the hidden dimension."""


class PatchEmbedding1D(_Named, PatchEmbedding):
    """An embedding of image patches, whole on every tensor rank."""


class LayerNorm1D(_Named, LayerNorm):
    """A layer norm, whole on every rank."""


class Dropout1D(_Named, Dropout):
    """Dropout with the same or with different masks on the tensor ranks."""


class VocabParallelCrossEntropyLoss1D(_Named, VocabParallelCrossEntropy):
    """The cross-entropy of logits that are split by classes over the tensor ranks."""


def split_forward_gather_backward(input_: Tensor, dim: int, process_group: Any = None) -> Tensor:
    """Returns this rank's piece of the sequence of `input_` (batch, sequence, hidden), which is the same on all ranks;
    gradients are gathered. Raises UsageError for a `dim` other than 1, and if the sequence cannot be split evenly.
    """
    _require_sequence(dim)
    return scatter_to_sequence_region(input_, tensor_group(process_group))


def gather_forward_split_backward(input_: Tensor, dim: int, process_group: Any = None) -> Tensor:
    """Returns the whole sequence from each rank's piece `input_` (batch, sequence / ranks, hidden); each rank takes its
    piece of the gradient. Raises UsageError for a `dim` other than 1.
    """
    _require_sequence(dim)
    return gather_from_sequence_region(input_, tensor_group(process_group))


def _require_sequence(dim: int) -> None:
    if dim != 1:
        raise UsageError(
            f"dim must be 1, the dimension of the sequence, got {dim}; pipeflow.tensor has the other mappings"
        )
