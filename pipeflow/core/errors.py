"""Every error pipeflow raises on purpose. What must not live here: the code that detects them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass


class PipeflowError(Exception):
    """Base of all errors raised by pipeflow."""


class UsageError(PipeflowError, ValueError):
    """An argument that cannot work; the message says what to do instead."""


class ScheduleError(UsageError):
    """A schedule that is malformed or that cannot run.

    `violations` lists everything that is wrong with it (empty when it could not even be read).
    """

    def __init__(self, message: str, violations: Sequence[object] = ()) -> None:
        lines = [message, *(f"  {violation}" for violation in violations[:20])]
        if len(violations) > 20:
            lines.append(f"  ... and {len(violations) - 20} more")
        super().__init__("\n".join(lines))
        self.violations = tuple(violations)


@dataclass(frozen=True, slots=True)
class Failure:
    """Where and why a step failed; travels between ranks as plain data.

    `action` is the text of the action that ran, None when the failure was outside any action.
    `died` is the rank whose process is gone, None when every process still lives.
    `number` counts the calls that all ranks make together: in which one it failed; None outside of any.
    """

    rank: int
    reason: str
    action: str | None = None
    stage: int | None = None
    microbatch: int | None = None
    died: int | None = None
    trace: str = ""
    number: int | None = None


class PipelineError(PipeflowError, RuntimeError):
    """A step failed on some rank; raised on every rank, with the same origin.

    Attributes:
        failure: the origin, a `Failure`.
        rank, stage, microbatch, action: the origin's fields, for convenience.
        died: the rank of the process that is gone, or None.
    """

    def __init__(self, failure: Failure) -> None:
        super().__init__(_describe(failure))
        self.failure = failure
        self.rank = failure.rank
        self.stage = failure.stage
        self.microbatch = failure.microbatch
        self.action = failure.action
        self.died = failure.died


def _describe(failure: Failure) -> str:
    if failure.died is not None:
        return f"rank {failure.died} died: {failure.reason}"
    where = f"rank {failure.rank} failed"
    if failure.action is not None:
        where += f" in {failure.action} (stage {failure.stage}, microbatch {failure.microbatch})"
    message = f"{where}: {failure.reason}"
    return f"{message}\n\nOn rank {failure.rank}:\n{failure.trace}" if failure.trace else message


def unknown(what: str, name: str, known: Collection[str]) -> UsageError:
    """The error for a name that is none of those `known`: it says the nearest one, or all where none is near."""
    from difflib import get_close_matches  # loaded by those who need it

    near = get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
    return UsageError(f"unknown {what} {name!r}; {hint}")
