"""How ColossalAI calls a criterion: with outputs and labels one by one."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any

from torch import Tensor, nn


class Called(nn.Module):
    """A criterion that is given what is in a tuple or list of outputs or labels as so many arguments, and the entries
    of a dict of labels as keywords, where it has parameters of their names; otherwise the dict.
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
