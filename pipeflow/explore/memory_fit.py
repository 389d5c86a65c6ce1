"""Fit: which ranks need more memory than they have, said in a sentence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pipeflow.core.text import bytes_text
from pipeflow.core.timeline import Timeline
from pipeflow.draw.memory import amount_text, peaks, unit_of
from pipeflow.planning.step_plan import Plan

NEARLY = 1 + 1e-9  # the amounts are sums


def above_caps(timeline: Timeline, cap: float | Sequence[float] | None) -> dict[str, Any] | None:
    """The ranks of a timeline that keep more than the cap, one number or one per rank, as JSON values: `ranks`, and
    `said` about them. None if there are none.
    """
    if cap is None:
        return None
    most = peaks(timeline)
    caps = list(cap) if isinstance(cap, Sequence) else [cap] * len(most)
    unit = "" if timeline.saved_bytes else f" {unit_of(timeline)}"
    return _misfit(most, caps, "the memory cap", lambda amount: amount_text(timeline, amount), unit)


def above_device(plan: Plan, memory: float, device: str) -> dict[str, Any] | None:
    """The same for the ranks of a plan and the memory of their device."""
    most = [rank.peak_bytes + plan.outside_bytes for rank in plan.ranks]
    return _misfit(most, [memory] * len(most), f"the room on {device}", bytes_text, "")


def _misfit(
    needed: Sequence[float], room: Sequence[float], limit: str, text: Callable[[float], str], unit: str
) -> dict[str, Any] | None:
    ranks = [rank for rank, (one, other) in enumerate(zip(needed, room, strict=True)) if one > other * NEARLY]
    if not ranks:
        return None
    worst = max(ranks, key=lambda rank: needed[rank] - room[rank])
    many = f"{len(ranks)} of {len(needed)} ranks {'is' if len(ranks) == 1 else 'are'} above {limit}"
    most = f"rank {worst}, {text(needed[worst])}{unit} of {text(room[worst])}"
    return {"ranks": ranks, "said": f"Does not fit: {many}; worst: {most}."}
