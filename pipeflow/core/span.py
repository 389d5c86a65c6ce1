"""Span: one action in time. What must not live here: why it began when it did, and measures of a whole timeline."""

from __future__ import annotations

from dataclasses import dataclass

from pipeflow.core.action import Action
from pipeflow.core.dataflow import DATAFLOW, Stream


@dataclass(frozen=True, slots=True)
class Span:
    """One action on one rank, from `start` to `end`, in the timeline's unit of time.

    The two actions of a pair have a span each, one after the other: how they overlap is told by their times, which are
    shorter than alone, and `partner` is the other one.
    """

    action: Action
    rank: int
    start: float
    end: float
    partner: Action | None = None

    @property
    def stream(self) -> Stream:
        """What of its rank the action occupies."""
        return DATAFLOW[self.action.kind].stream


Row = tuple[Span, ...]
