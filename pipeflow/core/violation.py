"""Violation: one thing that is wrong with a schedule or a program. What must not live here: the code that finds it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Violation:
    """One thing that is wrong. `rank` and `position` (an index into the rank's row or program) say where, when there
    is a place; `problem` says what is there, `expected` what should be.
    """

    problem: str
    expected: str
    rank: int | None = None
    position: int | None = None

    def __str__(self) -> str:
        where = "" if self.rank is None else f"rank {self.rank}"
        where += "" if self.position is None else f", position {self.position}"
        return (
            f"{where}: {self.problem}; expected {self.expected}"
            if where
            else f"{self.problem}; expected {self.expected}"
        )
