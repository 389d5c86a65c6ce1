"""Recordings: Chrome traces as torch.profiler would write them, of steps that are made up action by action."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from pipeflow.core.action import Action, Kind
from pipeflow.core.analysis.order import Order
from pipeflow.core.dataflow import Value, makes, needs
from pipeflow.core.placement import Placement
from pipeflow.core.schedule import Schedule
from pipeflow.core.timeline import Span, Timeline
from pipeflow.tools.traces import explanation
from pipeflow.tools.traces.explanation import Explanation


def explain(paths: Any, *, names: str | None = None) -> Explanation:
    """Explains traces of a pipeline."""
    found = explanation.explain(paths, names=names)
    assert isinstance(found, Explanation)
    return found


TIMES = {Kind.F: 1.0, Kind.B: 2.0, Kind.I: 1.0, Kind.W: 1.0}


@dataclass
class Machine:
    """How long things take, in milliseconds, and what is wrong.

    Attributes:
        jitter: by how much actions differ, as a share of their time.
        slow: per stage, the factor of its times.
        microbatches: per microbatch, the factor of its times.
        actions: per action, the factor of its time.
        links: per (from, to), the time of a transfer; 0.05 by default.
        late: per rank, the share of its actions that take twice as long.
        stalls: per rank, the share of its actions before which it stands still for twice a forward.
    """

    seed: int = 0
    jitter: float = 0.03
    slow: Mapping[int, float] = field(default_factory=dict)
    microbatches: Mapping[int, float] = field(default_factory=dict)
    actions: Mapping[str, float] = field(default_factory=dict)
    links: Mapping[tuple[int, int], float] = field(default_factory=dict)
    late: Mapping[int, float] = field(default_factory=dict)
    stalls: Mapping[int, float] = field(default_factory=dict)


def ran(schedule: Schedule, machine: Machine | None = None) -> Timeline:
    """The timeline of a step on a machine, in seconds."""
    machine = machine or Machine()
    chance = random.Random(machine.seed)
    stages, placement = schedule.placement.num_stages, schedule.placement
    made: dict[Value, tuple[float, int]] = {}
    rows: list[list[Span]] = [[] for _ in schedule.rows]
    for turn in Order(schedule):
        rank, row = turn.rank, rows[turn.rank]
        start = row[-1].end if row else 0.0
        for action in turn.actions:
            for value in needs(action, stages):
                when, where = made[value]
                start = max(start, when + (1e-3 * machine.links.get((where, rank), 0.05) if where != rank else 0.0))
        if chance.random() < machine.stalls.get(rank, 0.0):
            start += 2e-3 * TIMES[Kind.F] / placement.chunks_per_rank
        for action in turn.actions:
            time = TIMES[action.kind] / placement.chunks_per_rank * machine.slow.get(action.stage, 1.0)
            time *= machine.microbatches.get(action.microbatch, 1.0) * machine.actions.get(str(action), 1.0)
            time *= 1 + machine.jitter * chance.uniform(-1, 1)
            time *= 2 if chance.random() < machine.late.get(rank, 0.0) else 1
            partner = next((each for each in turn.actions if each != action), None)
            row.append(Span(action, rank, start, start := start + 1e-3 * time, partner))
        for action in turn.actions:
            made |= dict.fromkeys(makes(action, stages), (start, rank))
    return Timeline(schedule.name, placement, tuple(map(tuple, rows)), unit="s")


def of_torch(action: Action, pair: str) -> str:
    """The annotation of torch's runtime."""
    return f"PP:{pair or action}"


def record(
    folder: Path,
    *steps: Timeline,
    name: Callable[[Action, str], str] | None = of_torch,
    clocks: Mapping[int, float] = {},
    ranks: range | None = None,
    operators: bool = True,
    replicas: int = 1,
    groups: bool = False,
    marks: bool = False,
    lost: Container[tuple[int, int, int]] = (),
) -> Path:
    """Writes a trace per rank into a folder.

    Args:
        folder: the folder.
        steps: what ran, one after the other.
        name: the annotation of an action; None: there are no annotations.
        clocks: per rank on a machine of its own, the seconds that its clock is ahead.
        ranks: those whose traces are written; by default all.
        operators: whether operators are recorded.
        replicas: how many ranks each rank of the pipeline stands for, which are numbered one after the other.
        groups: whether the process groups of pipelines are written.
        marks: whether the steps are marked, as torch's profiler does.
        lost: (step, rank, place in its row) of actions of which no event was recorded.
    """
    folder.mkdir(exist_ok=True)
    size = len(steps[0].rows)
    for rank in range(size) if ranks is None else ranks:
        events: list[dict[str, Any]] = []
        zero, number = 100.0 + clocks.get(rank, 0.0), 1
        for index, step in enumerate(steps):
            if marks:
                times = {"ts": zero * 1e6, "dur": step.makespan * 1.4e6}
                events.append({"ph": "X", "cat": "user_annotation", "name": f"ProfilerStep#{index + 3}", **times})
            numbers: dict[tuple[int, int], int] = {}
            free = 0.0
            for place, span in enumerate(step.rows[rank]):
                action = span.action
                if action.kind is Kind.F:
                    numbers[action.stage, action.microbatch] = number = number + 10
                own = numbers[action.stage, action.microbatch]
                if (index, rank, place) not in lost:
                    events += _events(span, zero, free, own, None if name is None else name(action, ""), operators)
                    events += _messages(span, zero, free, step.placement)
                free = span.end
            zero += step.makespan * 1.5
        for replica in range(replicas):
            ranks_of = [each * replicas + replica for each in range(size)]
            config = [{"pg_desc": "default_pg", "ranks": []}, {"pg_desc": "mesh_pp", "ranks": ranks_of}]
            info = {"backend": "nccl", "rank": ranks_of[rank], "world_size": size * replicas}
            whole = {
                "schemaVersion": 1,
                "distributedInfo": info | ({"pg_config": config} if groups else {}),
                "host_name": f"host-{rank}" if clocks else "host",
                "traceEvents": events,
            }
            (folder / f"rank{ranks_of[rank]}.json").write_text(json.dumps(whole), encoding="utf-8")
    return folder


def _events(
    span: Span, zero: float, free: float, number: int, name: str | None, operators: bool
) -> list[dict[str, Any]]:
    """The events of an action: the annotation from where the rank is free on, and its operators."""
    event = partial(_event, zero)
    start, end, mid = span.start, span.end, (span.start + span.end) / 2
    found = [event("user_annotation", name, free if operators else start, end)] if name else []
    parts = [(start, mid), (mid, end)] if operators else []
    for place, (first, last) in enumerate(parts):
        if span.action.kind is Kind.F:
            args = {"Sequence number": number + place, "Fwd thread id": 0}
            found.append(event("cpu_op", "aten::mm", first, last, **args))
        else:
            args = {"Sequence number": number + 1 - place, "Fwd thread id": 1}
            found.append(event("cpu_op", "autograd::engine::evaluate_function: MmBackward0", first, last, **args))
    return found


def _messages(span: Span, zero: float, free: float, placement: Placement) -> list[dict[str, Any]]:
    """The receive before an action, from where the rank is free on, and the send after it, if other ranks are there."""
    action, last = span.action, placement.num_stages - 1
    path = placement.paths[action.microbatch % len(placement.paths)]
    step = {Kind.F: 1, Kind.B: -1, Kind.I: -1}.get(action.kind, 0)
    before, after = action.stage - step, action.stage + step
    found = []
    if step and 0 <= before <= last and path[before] != span.rank:
        found.append(_event(zero, "cpu_op", "c10d::recv_", free, free + 1e-6))
    if step and 0 <= after <= last and path[after] != span.rank:
        found.append(_event(zero, "cpu_op", "c10d::send", span.end, span.end + 1e-6))
    return found


def _event(zero: float, category: str, name: str, start: float, end: float, **args: object) -> dict[str, Any]:
    times = {"ts": (zero + start) * 1e6, "dur": (end - start) * 1e6}
    return {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": 1, **times, "args": args}
