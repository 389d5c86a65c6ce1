"""All errors that pipeflow raises on purpose; a violation: one thing that is wrong with a schedule or a program; and
checks of arguments that all parts share. Must not contain: code that detects other faults.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import index
from typing import Any, SupportsIndex, TypeVar

Meant = TypeVar("Meant")


class PipeflowError(Exception):
    """Base class of all errors of pipeflow.

    Attributes:
        first: the `Failure` that all ranks raise, if all ranks raise this error. It names one of them.
    """

    first: Failure | None = None


class UsageError(PipeflowError, ValueError):
    """An argument that cannot work. The message says what to do instead."""


class ScheduleError(UsageError):
    """A schedule that is malformed or cannot run.

    Args:
        message: what is wrong and what to do.
        violations: everything that is wrong with the schedule, also an attribute. Empty if it could not be read.
    """

    def __init__(self, message: str, violations: Sequence[object] = ()) -> None:
        lines = [message, *(f"  {violation}" for violation in violations[:20])]
        if len(violations) > 20:
            lines.append(f"  ... and {len(violations) - 20} more")
        super().__init__("\n".join(lines))
        self.violations = tuple(violations)


@dataclass(frozen=True, slots=True)
class Failure:
    """Where and why a step failed. Sent between ranks as plain data.

    Attributes:
        rank: the rank that failed.
        reason: what happened, in words.
        action: text of the action that was running. None: the failure was outside any action.
        stage, microbatch: those of the action.
        died: the rank whose process is gone. None: every process still runs.
        trace: traceback on the rank that failed, as text.
        number: index of the collective call in which it failed. None: the failure was outside of these calls.
        usage: whether it is a UsageError.
        left: whether the rank that is gone has said goodbye, as at the end of its script.
    """

    rank: int
    reason: str
    action: str | None = None
    stage: int | None = None
    microbatch: int | None = None
    died: int | None = None
    trace: str = ""
    number: int | None = None
    usage: bool = False
    left: bool = False

    def following(self, rank: int, reason: str) -> Failure:
        """This failure as a consequence of what `rank` did wrong."""
        return Failure(rank, f"{reason}; rank {self.rank} failed: {self.reason}", number=self.number, usage=True)


class PipelineError(PipeflowError, RuntimeError):
    """A step that failed on some rank. Every rank raises it, with the same origin.

    Attributes:
        failure: the origin, a `Failure`.
        rank, stage, microbatch, action: the fields of `failure`.
        died: the rank whose process is gone, or None.
    """

    def __init__(self, failure: Failure) -> None:
        super().__init__(_describe(failure))
        self.failure = failure
        self.rank = failure.rank
        self.stage = failure.stage
        self.microbatch = failure.microbatch
        self.action = failure.action
        self.died = failure.died


class PipelineUsageError(PipelineError, UsageError):
    """A UsageError of another rank. So code that catches UsageError catches it on every rank."""


def error_of(failure: Failure) -> PipelineError:
    """The error of a rank that is told of `failure`."""
    return PipelineUsageError(failure) if failure.usage else PipelineError(failure)


def _describe(failure: Failure) -> str:
    if failure.died is not None:
        return f"rank {failure.died} died: {failure.reason}"
    where = f"rank {failure.rank} failed"
    if failure.action is not None:
        where += f" in {failure.action} (stage {failure.stage}, microbatch {failure.microbatch})"
    message = f"{where}: {failure.reason}"
    return f"{message}\n\nOn rank {failure.rank}:\n{failure.trace}" if failure.trace else message


def require_type(what: str, value: object, kind: type | tuple[type, ...], write: str = "") -> None:
    """Raises UsageError for a `value` of another type than `kind`. The message has the line to `write` instead."""
    if not isinstance(value, kind):
        kinds = kind if isinstance(kind, tuple) else (kind,)
        names = " or ".join("pipeflow." * (each.__module__ != "builtins") + each.__name__ for each in kinds)
        raise UsageError(f"{what} must be a {names}, got {type(value).__name__}{f': {write}' if write else ''}")


def unknown(what: str, name: str, known: Collection[str], others: Mapping[str, str] | None = None) -> UsageError:
    """The error for a `name` that is not among `known`. It suggests the known name that `others`, the names of other
    programs in lower case without "-", "_" and spaces, stand for; or else the nearest one; or it lists all of them.
    """
    meant = meant_by(name, others or {})
    return UsageError(f"unknown {what} {name!r}; {f'did you mean {meant}?' if meant else nearest(name, known)}")


def meant_by(name: str, others: Mapping[str, Meant]) -> Meant | None:
    """What a name or an option of another program stands for, as in `unknown`; None if that is not known."""
    return others.get(re.sub("[-_ ]", "", name.lower()))


def nearest(name: str, known: Collection[str]) -> str:
    """Words for an error: the known name nearest to `name`, or all of them if none is near."""
    near = closest(name, known)
    return f"did you mean {near!r}?" if near else f"known: {', '.join(known)}"


def closest(name: str, known: Collection[str], *, cutoff: float = 0.6) -> str | None:
    """The known name nearest to `name`; None if none is as similar as `cutoff`, from 0 (any) to 1 (equal)."""
    from difflib import get_close_matches  # slow to load, and rarely needed

    return next(iter(get_close_matches(name, known, n=1, cutoff=cutoff)), None)


class NonFiniteError(PipeflowError, ArithmeticError):
    """A number of a step is infinite or NaN. Raised on every rank.

    Args:
        what: which number, and in which step.
        advice: what to do about it.
        step: number of steps taken before this one.

    `what` and `step` are attributes, too.
    """

    def __init__(self, what: str, advice: str, step: int) -> None:
        super().__init__(
            f"{what}: {advice}, or leave such steps out with Engine(non_finite='skip'). The weights were not changed "
            "by this step"
        )
        self.what = what
        self.step = step


class NonFiniteGradientError(NonFiniteError):
    """The gradient of a step is infinite or NaN, although the losses of its batches are finite.

    Args:
        step: number of steps taken before this one, also an attribute.
    """

    def __init__(self, step: int) -> None:
        advice = "look at its data and at operations with infinite derivatives, such as sqrt(0)"
        super().__init__(f"the gradient is not finite in step {step}, although the loss is", advice, step)


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


def names_of(what: str, given: object) -> tuple[str, ...]:
    """The names of an argument called `what`. Raises UsageError for anything but a name, or several of them."""
    return _several(what, given, str, "names")


def paths_of(what: str, given: object) -> tuple[str | os.PathLike[str], ...]:
    """The paths of an argument called `what`. Raises UsageError for anything but a path, or several of them."""
    return _several(what, given, (str, os.PathLike), "paths")


def numbers_of(what: str, given: object) -> tuple[int, ...]:
    """The whole numbers of an argument called `what`. Raises UsageError for anything but a number, or several."""
    return tuple(map(index, _several(what, given, SupportsIndex, "whole numbers")))


def _several(what: str, given: Any, kind: type | tuple[type, ...], said: str) -> tuple[Any, ...]:
    is_several = isinstance(given, Iterable) and not isinstance(given, str | bytes | os.PathLike)
    values = tuple(given) if is_several else (given,)
    if wrong := [value for value in values if not isinstance(value, kind) or isinstance(value, bool)]:
        raise UsageError(f"{what} must be a list of {said}, got {wrong[0]!r}")
    return values
