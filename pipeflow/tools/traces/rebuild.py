"""Rebuild: the timeline of each step from the events of all ranks, on one clock. Must not contain: the formats of
files, and why a rank was idle.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from pipeflow.core.action import Action, Kind
from pipeflow.core.dataflow import MAKERS, needs
from pipeflow.core.errors import UsageError
from pipeflow.core.placement import Placement
from pipeflow.core.rows import placement_of
from pipeflow.core.timeline import Row, Span, Timeline
from pipeflow.tools.traces.actions import Named, Names, RecordedAction, recorded_actions
from pipeflow.tools.traces.events import RankEvents
from pipeflow.tools.traces.steps import Step, give_stages, steps_of

Key = tuple[Kind, int, int]


def offsets(steps: Sequence[Step], num_stages: int, hosts: Sequence[str]) -> list[float]:
    """Per rank, the seconds to add to its times. None are added to ranks of one machine, whose clock they share, unless
    they contradict it.

    Values that pass between ranks tell how far the clocks of two machines are apart: nothing is used before it was
    made, in either direction. The shortest delay from rank to rank is taken as equal in both directions, so half of the
    difference between the two shortest ones that were measured is the difference between the clocks.
    """
    delays = _shortest(steps, num_stages)
    shifts = [0.0] * len(hosts)
    known, waiting = {0}, [0]
    while waiting:
        rank = waiting.pop()
        for other in range(len(hosts)):
            there, back = delays.get((rank, other)), delays.get((other, rank))
            if other in known or there is None or back is None:
                continue
            known.add(other)
            waiting.append(other)
            apart = hosts[rank] != hosts[other] or not hosts[rank] or min(there, back) < 0
            shifts[other] = shifts[rank] + (back - there) / 2 * apart
    return shifts


def _shortest(steps: Sequence[Step], num_stages: int) -> dict[tuple[int, int], float]:
    """The shortest time from when one rank made a value until another one used it, by (maker, user)."""
    found: dict[tuple[int, int], float] = {}
    for step in steps:
        made: dict[Key, tuple[int, float]] = {}
        for rank, actions in enumerate(step):
            for each in actions:
                made[each.action.kind, each.action.stage, each.action.microbatch] = rank, each.end
        for rank, actions in enumerate(step):
            for each in actions:
                others = [value for value in needs(each.action, num_stages) if value.stage != each.action.stage]
                keys = ((kind, value.stage, value.microbatch) for value in others for kind in MAKERS[value.content])
                for key in keys:
                    if key in made and (maker := made[key])[0] != rank:
                        place = maker[0], rank
                        found[place] = min(found.get(place, math.inf), each.start - maker[1])
    return found


Recorded = Sequence[RecordedAction]
HOW_TO = "record a step with torch.profiler on every rank and export_chrome_trace, one file per rank"


class Rebuilt(NamedTuple):
    """A step rebuilt from traces.

    Attributes:
        steps: a timeline per step, in seconds from the start of the step.
        notes: sentences on what was missing or mended.
    """

    steps: list[Timeline]
    notes: list[str]


def rebuilt(ranks: Sequence[RankEvents], names: Names) -> Rebuilt:
    """The timelines of the steps that all ranks recorded whole. Raises UsageError where a rank is missing or shows no
    action, with what can be told and how to record the rest.
    """
    ordered = _ordered(ranks)
    notes = [
        f"{each.source} is cut off: what comes after its end is not counted" for each in ordered if each.is_cut_off
    ]
    actions: list[Recorded] = [recorded_actions(each, names) for each in ordered]
    for events, found in zip(ordered, actions, strict=True):
        if not found:
            raise UsageError(f"{events.source} shows no forward or backward: {_without_actions(events)}")
    ordered, actions = _one_replica(ordered, actions)
    _require_all(ordered, actions)
    steps, damaged = steps_of(actions)
    if not steps:
        raise UsageError(f"no step was recorded on all {len(ordered)} ranks at once: record the same steps on each")
    if damaged:
        notes.append(f"actions are missing in {damaged} other steps, which are left out: the recording lost events")
    give_stages(steps)
    placement = placement_of([[each.action for each in own] for own in steps[0]])
    if placement is None:
        raise UsageError("the stages are on no fixed ranks: stages must have the same rank in every step")
    shifts = offsets(steps, placement.num_stages, [each.host for each in ordered])
    if any(shifts):
        notes.append("the clocks of the ranks differ, and were aligned by the values that pass between ranks")
    return Rebuilt([_timeline(step, placement, shifts) for step in steps], notes)


def _ordered(ranks: Sequence[RankEvents]) -> list[RankEvents]:
    """The ranks in order. Files that do not say their rank keep the order in which they are given."""
    known = [each.rank for each in ranks if each.rank is not None]
    if not known:
        return [replace(each, rank=index) for index, each in enumerate(ranks)]
    if len(known) < len(ranks):
        files = ", ".join(each.source for each in ranks if each.rank is None)
        raise UsageError(f"neither these files nor their names say a rank: {files}; name them like rank0.json")
    if twice := sorted({rank for rank in known if known.count(rank) > 1}):
        files = ", ".join(each.source for each in ranks if each.rank == twice[0])
        raise UsageError(f"rank {twice[0]} is in several files ({files}): give the files of one run")
    ordered = sorted(ranks, key=lambda each: each.rank or 0)
    if pipeline := ordered[0].pipeline:  # replicas and tensor ranks do the same: the first pipeline stands for all
        places = {rank: place for place, rank in enumerate(pipeline)}
        own = [each for each in ordered if each.rank in places]
        return [replace(each, rank=places[each.rank or 0], ranks=len(pipeline)) for each in own]
    return ordered


def _one_replica(ranks: list[RankEvents], actions: list[Recorded]) -> tuple[list[RankEvents], list[Recorded]]:
    """The first of all ranks that run the same stages for the same microbatches, if names say them: the others are
    replicas or tensor ranks.
    """
    first: dict[frozenset[Named], int] = {}
    for place, found in enumerate(actions):
        first.setdefault(frozenset(each.named for each in found), place)
    is_said = all(each.named.stage is not None and each.named.microbatch is not None for own in actions for each in own)
    if len(first) == len(ranks) or not is_said:
        return ranks, actions
    kept = [replace(ranks[place], rank=number, ranks=len(first)) for number, place in enumerate(first.values())]
    return kept, [actions[place] for place in first.values()]


def _without_actions(events: RankEvents) -> str:
    if not events.ranges and not events.operators and not events.kernels:
        return f"it has no annotation and no operator; {HOW_TO}"
    names = (each.name for each in events.ranges if not each.name.startswith("aten::"))
    some = ", ".join(dict.fromkeys(names))[:200]
    named = f"; its annotations are {some}" if some else ""
    return f"give --names, a regular expression with the groups kind, stage and microbatch{named}"


def _require_all(ranks: Sequence[RankEvents], actions: Sequence[Sequence[RecordedAction]]) -> None:
    """Raises UsageError if ranks are missing, with what those that are there show."""
    whole = max((each.ranks or 0 for each in ranks), default=0)
    numbers = [each.rank for each in ranks]
    if len(ranks) >= whole and numbers == list(range(len(ranks))):
        return
    told = []
    for events, found in zip(ranks, actions, strict=True):
        busy, length = sum(each.end - each.start for each in found), found[-1].end - found[0].start
        told.append(f"rank {events.rank} runs {len(found)} actions and computes {busy / length:.0%} of {length:.4g} s")
    of = f" of {whole}" if whole else ""
    raise UsageError(
        f"{len(ranks)}{of} ranks were recorded ({'; '.join(told)}), but a schedule shows on all of them alone: {HOW_TO}"
    )


def _timeline(step: Step, placement: Placement, shifts: Sequence[float]) -> Timeline:
    zero = min(each.start + shift for own, shift in zip(step, shifts, strict=True) for each in own)
    rows = tuple(_row(own, rank, shifts[rank] - zero) for rank, own in enumerate(step))
    return Timeline("trace", placement, rows, unit="s")


def _row(own: Sequence[RecordedAction], rank: int, shift: float) -> Row:
    """The spans of a rank. Computations of one rank run one after the other, so a span ends where the next one begins
    at the latest.
    """
    spans = []
    for index, each in enumerate(own):
        end = min([each.end, *(later.start for later in own[index + 1 : index + 2])])
        partner = None if each.named.partner is None else _partner(each.named.partner)
        spans.append(Span(each.action, rank, each.start + shift, max(end, each.start) + shift, partner))
    return tuple(spans)


def _partner(named: Named) -> Action:
    return Action(named.kind or Kind.F, named.stage or 0, named.microbatch or 0)
