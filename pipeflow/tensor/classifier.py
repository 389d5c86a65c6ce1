"""Classifiers: the last linear layer of a model, split so that any number of classes is possible."""

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
    """A linear layer that is split by rows and returns whole logits (..., num_classes) on every rank.

    The input is (..., in_features), the same on every rank.

    Args:
        in_features, num_classes, bias: sizes and bias of the whole layer, as in nn.Linear; any number of classes.
        weight: this rank's weight (num_classes, in_features / T), to share it with a HiddenParallelEmbedding; T is the
            number of tensor ranks. By default a new one.
        input_is_parallel: the input is this rank's part (..., in_features / T).
        dtype, device: of the parameters, as in torch.
        group: the tensor ranks; by default the tensor group of the context, or a group of one without a launch.

    Raises UsageError if T does not divide in_features, or `weight` has another shape.
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
    """A linear layer whose classes are split: each rank returns logits (..., ceil(num_classes / T)), where T is the
    number of tensor ranks. Logits of padding, at the end of the last ranks, are -inf.

    The input is (..., in_features), the same on every rank.

    Args:
        in_features, num_classes, bias: sizes and bias of the whole layer, as in nn.Linear; any number of classes.
        weight: this rank's weight (ceil(num_classes / T), in_features), to share it with a VocabParallelEmbedding. By
            default a new one.
        gather_output: return all num_classes logits on every rank.
        sequence_parallel: the input is this rank's piece (batch, sequence / T, in_features), as in
            ColumnParallelLinear.
        dtype, device: of the parameters, as in torch.
        group: the tensor ranks; by default the tensor group of the context, or a group of one without a launch.

    Raises UsageError if `weight` has another shape.
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
            input, self.weight, self.bias, Mode(group, self.sequence_parallel, self._deferred_weights(), self.copies)
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
