"""Pairing: how long a pair takes, from the times that its actions take alone. Must not contain: when it starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from pipeflow.core.action import Action, Kind


class Pairing(NamedTuple):
    """What the two actions of a pair hide of each other.

    Attributes:
        overlap: the share of the shorter action's computation that the longer one hides.
        shares: per kind of action and stage, the share of its time in which its tokens are exchanged between expert
            ranks. The other action can compute meanwhile. Empty: nothing is exchanged.
    """

    overlap: float = 0.0
    shares: Mapping[Kind, Sequence[float]] = {}

    @property
    def hides(self) -> bool:
        """Whether a pair may take less time than its two actions alone."""
        return bool(self.overlap or self.shares)

    @property
    def least(self) -> float:
        """A part of the times of its two actions alone that every pair takes, or more."""
        return 0.5 if self.shares else 1 - self.overlap / 2

    @classmethod
    def of(cls, overlap: float, exchange: Sequence[float], halves: Sequence[Sequence[float]]) -> Pairing:
        """`exchange` is the share of a forward and of a whole backward, per stage; `halves` are the times of both
        halves of a backward, per stage. The whole exchange of a backward belongs to its first half.
        """
        if not any(exchange):
            return cls(overlap)
        first = (min(1.0, x * (i + w) / i) if i else 0.0 for x, i, w in zip(exchange, *halves, strict=True))
        return cls(overlap, {Kind.F: exchange, Kind.B: exchange, Kind.I: tuple(first)})

    def share(self, action: Action) -> float:
        """The share of an action's time in which it exchanges tokens; of a stage that does not exist, the last one's"""
        shares = self.shares.get(action.kind)
        return shares[min(action.stage, len(shares) - 1)] if shares else 0.0

    def exchanged(self, pair: Sequence[Action], one: float, other: float) -> float:
        """The time in which a pair exchanges tokens, whose actions take the times `one` and `other` alone."""
        return self.share(pair[0]) * one + self.share(pair[1]) * other if self.shares else 0.0

    def exposed(self, actions: Sequence[Action], times: Sequence[float], taken: float) -> float:
        """The time in which a rank computes nothing while it runs an action, or a pair. Its actions take `times` alone,
        and together the time `taken`.
        """
        if not self.shares:
            return 0.0
        computes = [time * (1 - self.share(action)) for action, time in zip(actions, times, strict=True)]
        hidden = self.overlap * min(computes) if len(computes) > 1 else 0.0
        return max(0.0, taken - sum(computes) + hidden)

    def time(self, pair: Sequence[Action], one: float, other: float) -> float:
        """The time of a pair whose actions take the times `one` and `other` alone. A rank computes for one action at a
        time, but for what `overlap` hides, and its link moves the tokens of one at a time. So a pair takes the longest
        of four times: all computations, all exchanges, and each action alone.
        """
        if not self.shares:
            return one + other - self.overlap * min(one, other)
        computes = one * (1 - self.share(pair[0])), other * (1 - self.share(pair[1]))
        return max(sum(computes) - self.overlap * min(computes), self.exchanged(pair, one, other), one, other)
