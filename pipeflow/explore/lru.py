"""Kept: a bounded store of values that are slow to make. Must not contain: what the values are."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from threading import Lock
from typing import Generic, TypeVar

T = TypeVar("T")


class Kept(Generic[T]):
    """Values by their keys; those that were asked for last are kept. Threads may share it.

    Args:
        most: the largest sum of the sizes of all values. One value is always kept.
        size: the size of a value.
    """

    def __init__(self, most: int, size: Callable[[T], int]) -> None:
        self._most, self._size = most, size
        self._values: dict[Hashable, tuple[T, int]] = {}  # from the one that was asked for first to the last one
        self._lock = Lock()

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """The value of a key, which `make` makes if it is not there. Raises what `make` raises."""
        with self._lock:
            found = self._values.pop(key, None)
            if found is not None:
                self._values[key] = found
        if found is not None:
            return found[0]
        value = make()
        with self._lock:
            self._values[key] = value, self._size(value)
            total = sum(size for _, size in self._values.values())
            for old in [*self._values][:-1]:
                if total <= self._most:
                    break
                total -= self._values.pop(old)[1]
        return value
