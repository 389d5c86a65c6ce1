"""Schedules with recomputations, offloads and loads at every microbatch, for tests of the engine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from pipeflow import Action, Kind, Pipeline, Schedule, verify
from pipeflow.core.action import Entry, actions_of

Gradients = dict[str, Tensor]
USES: dict[str, tuple[str, str]] = {
    "recomputed": ("", "C"),
    "offloaded": ("O", "L"),
    "inputs offloaded": ("O", "LC"),
    "offloaded again": ("C", "OL"),
    "recomputed at once": ("COL", ""),
}
"""By the use of the kinds: what comes after the forward of a microbatch, and what before its first backward."""
MIXED = "mixed"  # each microbatch uses the kinds in another way, or not at all
ALL = (*USES, MIXED)


def with_kinds(schedule: Schedule, use: str) -> Schedule:
    """The schedule in which every microbatch uses the kinds in this way."""
    rows = tuple(tuple(_entries(row, use)) for row in schedule.rows)
    found = replace(schedule, name=f"{schedule.name}, {use}", rows=rows)
    assert verify(found) == []
    return found


def _entries(row: tuple[Entry, ...], use: str) -> Iterator[Entry]:
    for entry in row:
        for action in actions_of(entry):
            if action.kind in (Kind.B, Kind.I):
                yield from _actions(_use(use, action)[1], action)
        yield entry
        for action in actions_of(entry):
            if action.kind is Kind.F:
                yield from _actions(_use(use, action)[0], action)


def _use(use: str, action: Action) -> tuple[str, str]:
    ways = [*USES.values(), ("", "")]
    return ways[(action.microbatch + action.stage) % len(ways)] if use == MIXED else USES[use]


def _actions(kinds: str, action: Action) -> Iterator[Action]:
    return (replace(action, kind=Kind(kind)) for kind in kinds)


def uses_of(schedule: Schedule, uses: tuple[str, ...] = ALL) -> list[Schedule]:
    """The schedule, and the same with each of these uses."""
    return [schedule, *(with_kinds(schedule, use) for use in uses)]


def gradients_of(pipeline: Pipeline) -> Gradients:
    return {name: each.grad.clone() for name, each in pipeline.named_parameters() if each.grad is not None}


def differing(schedule: Schedule, found: Gradients, expected: Gradients) -> list[str]:
    """The gradients that are not the same, bit by bit."""
    assert found.keys() == expected.keys()
    assert found
    return [f"{schedule.name}: {name}" for name in expected if not torch.equal(found[name], expected[name])]


def steps_optimizer(schedule: Schedule) -> bool:
    """Whether the schedule has the optimizer's step."""
    return any(action.kind is Kind.S for action in schedule.actions(0))
