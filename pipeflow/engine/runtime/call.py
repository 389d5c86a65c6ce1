"""StepCall: the arguments of a step, as a number that ranks can compare, and in words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from pipeflow.core.schedule import Schedule


class StepCall(NamedTuple):
    """The arguments of `execute_pipeline`, which must be the same on all ranks, and the size of the batch, if known."""

    training: bool
    reduce: bool
    return_outputs: bool | Callable[[Any], object]
    broadcast_loss: bool
    trace: bool
    schedule: Schedule
    gradient_scale: float = 1.0
    batch: tuple[int, int] | None = None  # number of the replica, and samples of its batch

    @property
    def number(self) -> float:
        """A number that encodes the flags, but not the schedule and the scale."""
        return float(sum(int(bool(asked)) << position for position, asked in enumerate(self[:_FLAGS])))

    def __str__(self) -> str:
        return f"{in_words(self.number)} with {self.schedule.name!r}, {self.schedule.num_microbatches} microbatches"


def in_words(number: float) -> str:
    """Describes in words the call that has this number."""
    training, *asked = (bool(int(number) >> position & 1) for position in range(_FLAGS))
    names = StepCall._fields[1:_FLAGS]
    others = [f"{name}={value}" for name, value in zip(names, asked, strict=True) if value != _USUAL[name]]
    return ", ".join(["trains" if training else "evaluates", *others])


_FLAGS = StepCall._fields.index("schedule")
_USUAL = {"reduce": True, "return_outputs": False, "broadcast_loss": False, "trace": False}
