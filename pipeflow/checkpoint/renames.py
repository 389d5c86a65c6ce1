"""What a weight is called elsewhere, and how its entries lie there. What must not live here: files."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional

from pipeflow.core.errors import UsageError


@dataclass(frozen=True, slots=True)
class Transform:
    """How a stored weight becomes the model's, and back. Both are applied to whole tensors, and to "meta" tensors to
    learn the shape.
    """

    to_ours: Callable[[Tensor], Tensor]
    to_theirs: Callable[[Tensor], Tensor]

    def then(self, other: Transform) -> Transform:
        """This one, then `other`, on the way to the model; the other way around on the way out."""
        return Transform(
            lambda theirs: other.to_ours(self.to_ours(theirs)), lambda ours: self.to_theirs(other.to_theirs(ours))
        )

    @staticmethod
    def transposed() -> Transform:
        """A matrix (inputs, outputs), as of GPT-2's Conv1D, for one (outputs, inputs), as of nn.Linear."""
        return Transform(Tensor.t, Tensor.t)

    @staticmethod
    def interleaved(heads: int, parts: int = 3) -> Transform:
        """Rows that are stored as all queries, all keys, all values, (parts, heads, width), for rows that have those
        of each head together, (heads, parts, width), as a layer needs it that is split by heads.
        """
        return Transform(
            lambda theirs: _swapped(theirs, parts, heads),
            lambda ours: _swapped(ours, heads, parts),
        )

    @staticmethod
    def padded(*, stored: int, size: int) -> Transform:
        """`stored` rows for `size` rows, of which the last ones are zero: a vocabulary rounded up."""
        return Transform(
            lambda theirs: functional.pad(theirs, [0, 0] * (theirs.dim() - 1) + [0, size - stored]),
            lambda ours: ours[:stored],
        )


def _swapped(rows: Tensor, outer: int, inner: int) -> Tensor:
    return rows.view(outer, inner, -1, *rows.shape[1:]).transpose(0, 1).reshape(rows.shape)


AS_IT_IS = Transform(lambda theirs: theirs, lambda ours: ours)


@dataclass(frozen=True, slots=True)
class Rename:
    """A weight called `ours` in the model is called `theirs` in the files. Each "{}" in `ours` stands for one part of
    a name, and is put where `theirs` has its own.

    >>> Rename("blocks.{}.wide.weight", "h.{}.mlp.c_fc.weight").theirs_of("blocks.7.wide.weight")
    'h.7.mlp.c_fc.weight'
    """

    ours: str
    theirs: str
    transform: Transform = AS_IT_IS

    def __post_init__(self) -> None:
        if self.ours.count("{}") != self.theirs.count("{}"):
            raise UsageError(f"{self.ours!r} and {self.theirs!r} must have as many {{}} as each other")

    def theirs_of(self, name: str) -> str | None:
        """What the files call `name`; None when this is not about it."""
        found = re.fullmatch(re.escape(self.ours).replace(r"\{\}", r"([^.]+)"), name)
        return None if found is None else self.theirs.format(*found.groups())


def renamed(name: str, renames: Iterable[Rename]) -> tuple[str, Transform]:
    """What the files call `name`, by the first rename that is about it; its own name when none is."""
    for rename in renames:
        if (theirs := rename.theirs_of(name)) is not None:
            return theirs, rename.transform
    return name, AS_IT_IS
