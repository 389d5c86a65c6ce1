"""Span: one action in time. Must not contain: why it started when it did, and measures of a whole timeline."""

from __future__ import annotations

from dataclasses import dataclass

from pipeflow.core.action import Action
from pipeflow.core.dataflow import DATAFLOW, Stream


@dataclass(frozen=True, slots=True)
class Span:
    """One action on one rank, with its start and end in the timeline's unit of time.

    The two actions of a pair have one span each, one after the other. Because the actions overlap, these spans are
    shorter than the actions alone.

    Attributes:
        action: the action.
        rank: the rank that runs it.
        start, end: when it starts and ends.
        partner: the other action of its pair; None outside a pair.
    """

    action: Action
    rank: int
    start: float
    end: float
    partner: Action | None = None

    @property
    def stream(self) -> Stream:
        """The stream that the action runs on."""
        return DATAFLOW[self.action.kind].stream


Row = tuple[Span, ...]
"""The spans of one rank, in the order of their starts."""
