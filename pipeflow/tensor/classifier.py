"""Classifiers: the last linear layer, split so that any number of classes will do."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipeflow.core.errors import UsageError
from pipeflow.parallel.sharding import Split
from pipeflow.parallel.transport.group import Group
from pipeflow.tensor.division import divide, divide_padded, real_rows
from pipeflow.tensor.linear import SplitLinear, column_splits, row_forward
from pipeflow.tensor.matmul import Mode, column_linear
from pipeflow.tensor.regions import gather_from_tensor_region


class Classifier(SplitLinear):
    """A linear layer with whole logits (..., num_classes) on every rank, split by rows: any number of classes.

    Takes (..., in_features), the same on every rank, or with `input_is_parallel` each rank's (..., in_features / T).

    Args:
        weight: this rank's part (num_classes, in_features / T), to share it with a HiddenParallelEmbedding.
        group: by default the tensor group of the context, and without a launch the group of one.

    Raises UsageError when the tensor size does not divide in_features, or `weight` has another shape.
    """

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        bias: bool = True,
        *,
        weight: nn.Parameter | None = None,
        input_is_parallel: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        group: Group | None = None,
    ) -> None:
        super().__init__()
        columns = divide(self._get_name(), "in_features", in_features, self.join(group).size)
        self.input_is_parallel = input_is_parallel
        shape = (num_classes, columns)
        _require_shape(self._get_name(), weight, shape)
        size = num_classes if bias else None
        self._make((in_features, num_classes), shape if weight is None else weight, size, dtype, device)

    def forward(self, input: Tensor) -> Tensor:
        return row_forward(self, input, self.input_is_parallel, sequence_parallel=False)

    def splits(self) -> Mapping[str, Split]:
        return {"weight": Split(1, self.in_features)}


class VocabParallelClassifier(SplitLinear):
    """A linear layer whose classes are split: each rank gives its logits (..., ceil(num_classes / T)), those of
    padding, at the end of the last ranks, being -inf; with `gather_output` all num_classes of them on every rank.

    Takes (..., in_features), the same on every rank; with `sequence_parallel` this rank's piece (batch, sequence / T,
    in_features), as a ColumnParallelLinear does.

    Args:
        weight: this rank's part (ceil(num_classes / T), in_features), to share it with a VocabParallelEmbedding.
        group: by default the tensor group of the context, and without a launch the group of one.

    Raises UsageError when `weight` has another shape.
    """

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        bias: bool = True,
        *,
        weight: nn.Parameter | None = None,
        gather_output: bool = False,
        sequence_parallel: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        group: Group | None = None,
    ) -> None:
        super().__init__()
        rows = divide_padded(self._get_name(), "num_classes", num_classes, self.join(group))
        self.gather_output, self.sequence_parallel = gather_output, sequence_parallel
        _require_shape(self._get_name(), weight, (rows, in_features))
        shape = (rows, in_features) if weight is None else weight
        self._make((in_features, num_classes), shape, rows if bias else None, dtype, device)

    def forward(self, input: Tensor) -> Tensor:
        self._require_width(input, "")
        group = self.group
        logits = column_linear(
            input, self.weight, self.bias, Mode(group, self.sequence_parallel, self._deferred_weights())
        )
        columns = logits.shape[-1]
        real = real_rows(self.out_features, columns, group.rank)
        if self.gather_output:
            return gather_from_tensor_region(logits, group)[..., : self.out_features]
        return logits if real == columns else functional.pad(logits[..., :real], (0, columns - real), value=-torch.inf)

    def splits(self) -> Mapping[str, Split]:
        return column_splits(self)


def _require_shape(layer: str, weight: nn.Parameter | None, shape: tuple[int, int]) -> None:
    if weight is not None and tuple(weight.shape) != shape:
        raise UsageError(f"{layer} needs a weight of shape {shape} on each rank, got {tuple(weight.shape)}")
