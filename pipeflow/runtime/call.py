"""Call: what a rank was asked to do in a step, as a number that ranks can compare, and in words."""

from __future__ import annotations

from typing import NamedTuple


class Call(NamedTuple):
    """What `execute_pipeline` was asked for, but for the schedule and the batch. All ranks must be asked the same."""

    training: bool
    reduce: bool
    return_outputs: bool
    broadcast_loss: bool
    trace: bool

    @property
    def number(self) -> float:
        """What tells it from others."""
        return float(sum(asked << position for position, asked in enumerate(self)))

    @classmethod
    def numbered(cls, number: float) -> Call:
        """The call that has this number."""
        return cls(*(bool(int(number) >> position & 1) for position in range(len(cls._fields))))

    def __str__(self) -> str:
        return ", ".join(
            [
                "trains" if self.training else "evaluates",
                *(["reduce=False"] if self.training and not self.reduce else []),
                *(f"{name}=True" for name in ("return_outputs", "broadcast_loss", "trace") if getattr(self, name)),
            ]
        )
