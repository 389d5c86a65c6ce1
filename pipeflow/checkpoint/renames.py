"""Rename and Transform: names and layouts of weights in files of other libraries. Must not contain: reading and
writing files.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional

from pipeflow.core.errors import UsageError


@dataclass(frozen=True, slots=True)
class Transform:
    """A conversion of a stored weight to the model's weight, and back. Both functions get whole tensors; they also get
    tensors on the meta device, to find out the shape.

    Attributes:
        to_ours: converts the stored tensor to the model's.
        to_theirs: converts the model's tensor to the stored one.
    """

    to_ours: Callable[[Tensor], Tensor]
    to_theirs: Callable[[Tensor], Tensor]

    def then(self, other: Transform) -> Transform:
        """Returns the Transform that applies this one, then `other`, when loading; in reverse order when saving."""
        return Transform(
            lambda theirs: other.to_ours(self.to_ours(theirs)), lambda ours: self.to_theirs(other.to_theirs(ours))
        )

    @staticmethod
    def transposed() -> Transform:
        """Transposes a stored matrix [inputs, outputs], as in GPT-2's Conv1D, to [outputs, inputs], as in nn.Linear."""
        return Transform(Tensor.t, Tensor.t)

    @staticmethod
    def interleaved(heads: int, parts: int = 3) -> Transform:
        """Reorders the rows of a packed projection, so that the layer can be split by heads. The stored order is
        [parts, heads, width]: all queries, all keys, all values. The model's order is [heads, parts, width]: queries,
        keys and values of each head.
        """
        return Transform(
            lambda theirs: _swapped(theirs, parts, heads),
            lambda ours: _swapped(ours, heads, parts),
        )

    @staticmethod
    def padded(*, stored: int, size: int) -> Transform:
        """Pads a weight of `stored` rows to `size` rows with zeros, such as for a vocabulary that is rounded up."""
        return Transform(
            lambda theirs: functional.pad(theirs, [0, 0] * (theirs.dim() - 1) + [0, size - stored]),
            lambda ours: ours[:stored],
        )


def _swapped(rows: Tensor, outer: int, inner: int) -> Tensor:
    return rows.view(outer, inner, -1, *rows.shape[1:]).transpose(0, 1).reshape(rows.shape)


AS_IT_IS = Transform(lambda theirs: theirs, lambda ours: ours)


@dataclass(frozen=True, slots=True)
class Rename:
    """The name of a weight, or of several by a pattern, in files.

    Args:
        ours: name in the whole model. Each "{}" stands for one part of the name, without dots.
        theirs: name in the files, with the same number of "{}", which get the same parts in order.
        transform: conversion between the stored weight and the model's; by default none.

    >>> Rename("blocks.{}.wide.weight", "h.{}.mlp.c_fc.weight").theirs_of("blocks.7.wide.weight")
    'h.7.mlp.c_fc.weight'
    """

    ours: str
    theirs: str
    transform: Transform = AS_IT_IS

    def __post_init__(self) -> None:
        if self.ours.count("{}") != self.theirs.count("{}"):
            raise UsageError(f"{self.ours!r} and {self.theirs!r} must have the same number of {{}}")

    def theirs_of(self, name: str) -> str | None:
        """Returns the name of the weight `name` in the files; None if it does not match `ours`."""
        found = re.fullmatch(re.escape(self.ours).replace(r"\{\}", r"([^.]+)"), name)
        return None if found is None else self.theirs.format(*found.groups())


def renamed(name: str, renames: Iterable[Rename]) -> tuple[str, Transform]:
    """The name of `name` in the files and its transform, by the first rename that matches; unchanged if none does."""
    for rename in renames:
        if (theirs := rename.theirs_of(name)) is not None:
            return theirs, rename.transform
    return name, AS_IT_IS
