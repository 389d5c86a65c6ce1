"""Identities: numbers that say how each tensor of a forward was computed. Two runs of a forward computed the same if
their results have the same numbers. Must not contain: what is done about it if they have not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipeflow.engine.torch_private.trees import tree_leaves

_MOST = 1024  # entries of a constant whose values are read


class Identity(NamedTuple):
    """How a tensor was computed.

    Attributes:
        made: number of what its memory has: of the operator that made or last wrote it, and of all before.
        offset: place of the tensor in that memory.
        look: its shape, strides and dtype.
    """

    made: int
    offset: int
    look: tuple[Any, ...]

    @classmethod
    def of_source(cls, source: int) -> Identity:
        """That of all of a parameter or buffer with this bit."""
        return cls(hash((cls, source)), 0, ())


class Identities:
    """The identities of the tensors of one run.

    Args:
        key: function that gives a number for the memory of a tensor.
        draws: whether tensors that no operator made may have been drawn, and are other ones in each run.

    Attributes:
        writes: for each memory that was written to in place, the times and the numbers that it had then.
    """

    def __init__(self, key: Callable[[Tensor], int], *, draws: bool = False) -> None:
        self._key = key
        self._draws = draws
        self.writes: dict[int, list[tuple[int, int]]] = {}
        self._made: dict[int, tuple[int, int]] = {}  # by memory: the number, and the offset where the memory begins

    def of(self, tensor: Tensor) -> Identity:
        """The identity of a tensor. One that no operator made is known by its values, if these are few integers on the
        CPU: to read others, the host would wait for a device.
        """
        key = self._key(tensor)
        if key not in self._made:
            self._made[key] = 0 if self._draws else _constant(tensor), 0
        made, offset = self._made[key]
        return Identity(made, offset + _offset(tensor), _look(tensor))

    def give(self, tensor: Tensor, identity: Identity) -> None:
        """Gives a tensor with memory of its own an identity of another run."""
        self._made[self._key(tensor)] = identity.made, identity.offset - _offset(tensor)

    def note(
        self, func: object, given: Iterable[object], output: object, written: Iterable[Tensor], clock: int
    ) -> None:
        """Records one operator: its arguments as `identified` before it ran, its output, what it wrote to, and when."""
        number = hash((func, *given))
        for tensor in written:
            key = self._key(tensor)
            self._made[key] = hash((self._made[key][0], number)), self._made[key][1]
            self.writes.setdefault(key, []).append((clock, self._made[key][0]))
        for index, tensor in enumerate(tree_leaves(output)):
            if isinstance(tensor, Tensor) and self._key(tensor) not in self._made:
                self._made[self._key(tensor)] = hash((number, index)), 0

    def identified(self, leaves: Iterable[object]) -> list[object]:
        """The arguments of an operator with tensors replaced by their identities."""
        return [self.of(leaf) if isinstance(leaf, Tensor) else _plain(leaf) for leaf in leaves]


def _constant(tensor: Tensor) -> int:
    is_read = type(tensor) is Tensor and tensor.device.type == "cpu" and not tensor.is_floating_point()
    return hash(str(tensor.tolist())) if is_read and tensor.numel() <= _MOST else 0


def _offset(tensor: Tensor) -> int:
    return int(tensor.storage_offset()) if tensor.layout is torch.strided else 0


def _look(tensor: Tensor) -> tuple[Any, ...]:
    stride = tensor.stride() if tensor.layout is torch.strided else ()
    return tuple(tensor.shape), tuple(stride), tensor.dtype


def _plain(leaf: object) -> object:
    """The argument itself, but of a float its type: Python may have drawn it, and then each run has another."""
    return leaf if isinstance(leaf, int | str | torch.dtype | None) else float if isinstance(leaf, float) else str(leaf)
