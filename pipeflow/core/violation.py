"""Violation: one thing that is wrong with a schedule or a program. Must not contain: the code that finds it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Violation:
    """One thing that is wrong with a schedule or a program. `str` gives it as one sentence.

    Attributes:
        problem: what the schedule or program has.
        expected: what it should have instead. Empty if `problem` says it.
        rank: the rank of the violation, or None if it has none.
        position: index of the entry in the rank's row, or of the instruction in its program; None if there is none.
        cycle: for a deadlock, the (rank, position) of all entries that wait for each other. Each would have to come
            before the next one, and the last before the first. Empty for other violations.
        earlier: for an action that runs again, the (rank, position) where it ran before.
        incomplete: the (stage, microbatch) that has too few or too many actions.
    """

    problem: str
    expected: str
    rank: int | None = None
    position: int | None = None
    cycle: tuple[tuple[int, int], ...] = ()
    earlier: tuple[int, int] | None = None
    incomplete: tuple[int, int] | None = None

    @property
    def sentence(self) -> str:
        """The violation in words, without its rank and position."""
        if self.incomplete is not None or not self.expected:
            return self.problem
        if self.earlier is None:
            return f"{self.problem}; expected {self.expected}"
        rank, position = self.earlier
        return f"{self.problem}: it is on rank {rank} already, at position {position}"

    def __str__(self) -> str:
        where = "" if self.rank is None else f"rank {self.rank}"
        where += "" if self.position is None else f", position {self.position}"
        return f"{where}: {self.sentence}" if where else self.sentence
