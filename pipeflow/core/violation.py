"""Violation: one thing that is wrong with a schedule or a program. Must not contain: the code that finds it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Violation:
    """One thing that is wrong with a schedule or a program. `str` gives it as one sentence.

    Attributes:
        problem: what is there.
        expected: what should be there. Empty if `problem` says it.
        rank: the rank that it is on, if it is on one.
        position: index of the entry in the rank's row, or of the instruction in its program, if there is one.
        cycle: of a deadlock, the (rank, position) of all that wait for each other, each of which would have to come
            before the next, and the last before the first. Empty for everything else.
        earlier: of an action that runs again, the (rank, position) where it ran before.
        incomplete: the (stage, microbatch) whose actions are not all there, or too many.
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
        return f"{self.problem}: it stands on rank {rank} already, at position {position}"

    def __str__(self) -> str:
        where = "" if self.rank is None else f"rank {self.rank}"
        where += "" if self.position is None else f", position {self.position}"
        return f"{where}: {self.sentence}" if where else self.sentence
