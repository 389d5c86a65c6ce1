"""Absent: stands for an object that a stage does not have. Must not contain: which objects these are."""

from __future__ import annotations

from typing import Any

from pipeflow.core.errors import UsageError


class Absent:
    """An object whose use raises UsageError.

    Args:
        said: text of the error.
    """

    def __init__(self, said: str) -> None:
        self.__dict__["_said"] = said

    def _refuse(self, *_: object, **__: object) -> Any:
        raise UsageError(self.__dict__["_said"])

    __getattr__ = __getitem__ = __iter__ = __call__ = __bool__ = __len__ = __setattr__ = _refuse
