"""Called: calls a criterion as ColossalAI does, with outputs and labels as separate arguments."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any

from torch import Tensor, nn


class Called(nn.Module):
    """Calls a criterion with the elements of a tuple or list of outputs or labels as separate arguments. The entries of
    a dict of labels become keyword arguments if the criterion has parameters of their names; else it gets the dict.
    """

    def __init__(self, criterion: Callable[..., Tensor]) -> None:
        super().__init__()
        self.criterion = criterion
        target = criterion.forward if isinstance(criterion, nn.Module) else criterion
        self._named = frozenset(signature(target).parameters)

    def forward(self, output: Any, labels: Any) -> Tensor:
        outputs = output if isinstance(output, tuple | list) else [output]
        if isinstance(labels, dict) and labels.keys() <= self._named:
            return self.criterion(*outputs, **labels)
        return self.criterion(*outputs, *(labels if isinstance(labels, tuple | list) else [labels]))
