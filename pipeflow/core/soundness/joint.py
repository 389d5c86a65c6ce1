"""Joint actions: what is wrong with the reductions of a schedule. Must not contain: when they run."""

from __future__ import annotations

from collections.abc import Iterator

from pipeflow.core.action import Action, Entry, Kind
from pipeflow.core.dataflow import DATAFLOW, Content
from pipeflow.core.errors import Violation
from pipeflow.core.rows import Last, last_made
from pipeflow.core.schedule import Schedule


def wrong_joint(schedule: Schedule) -> Iterator[Violation]:
    """Every violation of the joint actions of a schedule, at most one per action whose stage and microbatch exist.

    A schedule reduces no stage, or each stage once on each rank that makes weight gradients of it. If one rank did not
    take part, the others would wait for it; if one stage was left out, its copies would drift apart. A reduction comes
    after all weight gradients of its stage on its rank, and has the microbatch of the last one.
    """
    for kind, flow in DATAFLOW.items():
        if flow.joint and any(_is(kind, entry) for row in schedule.rows for entry in row):
            for rank, row in enumerate(schedule.rows):
                yield from _in_row(schedule, kind, rank, row)


def _is(kind: Kind, entry: Entry) -> bool:
    return isinstance(entry, Action) and entry.kind is kind


def _in_row(schedule: Schedule, kind: Kind, rank: int, row: tuple[Entry, ...]) -> Iterator[Violation]:
    [(content, _)] = DATAFLOW[kind].needs
    stages, microbatches = schedule.placement.num_stages, schedule.num_microbatches
    last = last_made(row, content)
    again = {
        entry.stage: position
        for position, entry in enumerate(row)
        if isinstance(entry, Action) and entry.kind is not kind and _makes_again(entry.kind, content)
    }
    seen: set[int] = set()
    for position, entry in enumerate(row):
        if isinstance(entry, Action) and entry.kind is kind:
            wanted = _wanted(row, position, entry, last.get(entry.stage), entry.stage in seen)
            if wanted is None and not DATAFLOW[kind].makes and position < (made := again.get(entry.stage, -1)):
                wanted = f"it after {row[made]}"
            if wanted and entry.stage < stages and entry.microbatch < microbatches:
                yield Violation(f"{entry} is wrong here", wanted, rank, position)
            seen.add(entry.stage)
    for stage, (position, microbatch) in last.items():
        if stage not in seen:
            wanted = f"{Action(kind, stage, microbatch)} after {row[position]}, since others have one"
            yield Violation(f"stage {stage} has no {DATAFLOW[kind].name}", wanted, rank)


def _makes_again(kind: Kind, content: Content) -> bool:
    """Whether a joint action makes again what it needs, as a reduction does."""
    flow = DATAFLOW[kind]
    return flow.joint and (content, 0) in flow.makes


def _wanted(row: tuple[Entry, ...], position: int, action: Action, last: Last | None, again: bool) -> str | None:
    """The expected entry in the place of a joint action; None if the action is right."""
    flow = DATAFLOW[action.kind]
    [(content, _)] = flow.needs
    if last is None:
        return f"a {flow.name} only of a stage with a {content} on this rank"
    if again:
        return f"one {flow.name} per stage on a rank"
    if position < last.position:
        return f"it after {row[last.position]}, the last {content} of its stage"
    if action.microbatch != last.microbatch:
        right = Action(action.kind, action.stage, last.microbatch)
        return f"{right}, with the microbatch of the last {content} of its stage"
    return None
