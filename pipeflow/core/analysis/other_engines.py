"""Schedules for other engines: as a table of torch.distributed.pipelining with the sends and receives between
computations, and as instructions of DeepSpeed's pipeline engine with their buffers. Must not contain: the programs of
pipeflow's own engine, which `lower` makes, and an import of DeepSpeed, which the caller passes.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from pipeflow.core.action import Action, Entry, Kind, actions_of
from pipeflow.core.analysis.simulation import simulate
from pipeflow.core.cost import CostModel
from pipeflow.core.dataflow import PASSING, Content, Stream, makes, stream_of
from pipeflow.core.errors import UsageError
from pipeflow.core.placement import Placement
from pipeflow.core.rows import HANDLING, cells
from pipeflow.core.schedule import Schedule, require_unsliced

WAITS_SINCE = (2, 15)  # the version of torch
LETTERS = {Content.ACTIVATION: "F", Content.GRADIENT: "B"}


def lowered_csv(schedule: Schedule, torch: str | None = None) -> str:
    """The schedule as CSV with its sends, receives and reductions, one line per rank, as torch's `_load_csv` reads it
    with the format "compute_comms". In a reduction, torch divides gradients by the number of microbatches, also without
    replicas. The weights of stages without unshards are gathered before their first action and freed after their last
    one (UNSHARD, RESHARD), which does nothing in torch to stages that are not sharded.

    Each transfer is written into both rows at the moment when its value is made. So two ranks have their transfers in
    the same order, as one communicator for both of them needs. Since torch 2.15, a table has a wait for each send and
    each reduction: for the send of an activation after its stage's own backward, for that of a gradient at the end.

    Args:
        schedule: the schedule.
        torch: the version of torch that reads the table, such as "2.13"; by default the one that is installed, or the
            newest.

    Raises UsageError for a schedule of two directions, which torch has none of, or for what is no version, and
    ScheduleError for a schedule that cannot run to its end.
    """
    require_unsliced(schedule, "torch.distributed.pipelining")
    placement, schedule = schedule.placement, schedule.with_reductions()
    schedule = replace(schedule, rows=tuple(map(_whole_throughout, schedule.rows)))
    if len(placement.paths) > 1:
        raise UsageError(f"{schedule.name} has each stage on two ranks, which torch.distributed.pipelining cannot say")
    texts = [list(cells(row)) for row in schedule.rows]
    lines: list[list[str]] = [[] for _ in schedule.rows]
    sent: list[dict[tuple[int, int, Content], str]] = [{} for _ in schedule.rows]  # the wait for each send
    waits = _has_waits(torch)
    for rank, place in _in_order(schedule):
        entry, line = schedule.rows[rank][place], lines[rank]
        line.append(texts[rank][place])
        for action in actions_of(entry) if waits else ():
            if action.kind is Kind.R:
                line.append(f"{action.stage}WAIT_REDUCE_GRAD")
            elif action.kind in (Kind.B, Kind.I):
                line += filter(None, [sent[rank].pop((action.stage, action.microbatch, Content.ACTIVATION), None)])
        for value in (value for action in actions_of(entry) for value in makes(action, placement.num_stages)):
            if value.content in LETTERS:
                user = value.stage + PASSING[value.content]
                if (peer := placement.rank_of(user)) != rank:
                    send = f"SEND_{LETTERS[value.content]}{value.microbatch}"
                    line.append(f"{value.stage}{send}")
                    lines[peer].append(f"{user}RECV_{LETTERS[value.content]}{value.microbatch}")
                    sent[rank][value.stage, value.microbatch, value.content] = f"{value.stage}WAIT_{send}"
    if waits:
        lines = [[*line, *rest.values()] for line, rest in zip(lines, sent, strict=True)]
    return "".join(",".join(line) + "\n" for line in lines)


def _has_waits(torch: str | None) -> bool:
    """Whether a version of torch, by default the one that is installed, reads tables with waits."""
    if torch is None:
        try:
            torch = version("torch")
        except PackageNotFoundError:
            return True
    if (parts := re.match(r"(\d+)\.(\d+)", torch)) is None:
        raise UsageError(f'torch must be a version such as "2.15", got {torch!r}')
    return (int(parts[1]), int(parts[2])) >= WAITS_SINCE


def _whole_throughout(row: tuple[Entry, ...]) -> tuple[Entry, ...]:
    """The row with the weights of stages without unshards whole from their first entry to their last one."""
    have = {action.stage for entry in row for action in actions_of(entry) if action.kind in HANDLING}
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for place, entry in enumerate(row):
        for stage in {action.stage for action in actions_of(entry)} - have:
            first.setdefault(stage, place)
            last[stage] = place
    entries: list[Entry] = []
    for place, entry in enumerate(row):
        entries += [Action(Kind.U, stage, 0) for stage in sorted(first) if first[stage] == place]
        entries.append(entry)
        entries += [Action(Kind.H, stage, 0) for stage in sorted(last) if last[stage] == place]
    return tuple(entries)


def _in_order(schedule: Schedule) -> Iterator[tuple[int, int]]:
    """The places of all entries, in the order in which they end in a simulation."""
    found: list[tuple[float, int, int]] = []
    for rank, (row, spans) in enumerate(zip(schedule.rows, simulate(schedule).on(Stream.COMPUTE), strict=True)):
        ends, end = iter(spans), 0.0
        for place, entry in enumerate(row):
            if stream_of(entry) is Stream.COMPUTE:
                end = max(next(ends).end for _ in actions_of(entry))
            found.append((end, rank, place))
    return ((rank, place) for _, rank, place in sorted(found))


Instruction = tuple[str, int | None]  # its name, and its buffer
Step = list[Instruction]
Event = tuple[float, int, int, Step]  # when, what comes first at the same time, rank, instructions without buffers

KINDS = {"ForwardPass": Kind.F, "BackwardPass": Kind.B}
ENDS = {  # of a transfer: the instruction of the peer, and the way to it
    "SendActivation": ("RecvActivation", 1),
    "RecvActivation": ("SendActivation", -1),
    "SendGrad": ("RecvGrad", -1),
    "RecvGrad": ("SendGrad", 1),
}
LAST: Step = [("ReduceTiedGrads", None), ("ReduceGrads", None), ("OptimizerStep", None)]

# Theory of operation
#
# DeepSpeed's sends and receives block. So there must be one order of all computations and transfers in which each rank
# has its part; then no rank can wait for another one that waits for it. Here it is the order of a simulation, with a
# transfer of an activation when it was made. The engine has one place for a gradient that was received, so a gradient
# is transferred just before the backward that needs it. It has one place for a loss, too, so on the last rank each
# backward directly follows its forward, and an activation is transferred just before that.


def deepspeed_schedule(schedule: Schedule, module: Any) -> type:
    """A `PipeSchedule` of DeepSpeed that executes the order of `schedule`. It takes the place of its `TrainSchedule`:

        from deepspeed.runtime.pipe import schedule
        schedule.TrainSchedule = pipeflow.deepspeed_schedule(order, schedule)

    Args:
        schedule: the order, with one stage per rank and whole backwards.
        module: `deepspeed.runtime.pipe.schedule`, which has the classes of instructions.

    Raises UsageError for an order that the engine cannot execute, and ScheduleError for one that cannot run to its end.
    """
    steps = deepspeed_steps(schedule)
    sizes = (schedule.num_microbatches, len(steps))

    class OrderedSchedule(module.PipeSchedule):  # type: ignore[misc]  # DeepSpeed's
        """Executes the order of a schedule that pipeflow made."""

        def steps(self) -> Iterator[list[Any]]:
            if (self.micro_batches, self.stages) != sizes:
                raise UsageError(
                    f"{schedule.name} has {sizes[0]} microbatches and {sizes[1]} stages, but the engine has "
                    f"{self.micro_batches} and {self.stages}"
                )
            for step in steps[self.stage_id]:
                yield [
                    getattr(module, name)() if buffer is None else getattr(module, name)(buffer)
                    for name, buffer in step
                ]

        def num_pipe_buffers(self) -> int:
            found = (buffer for step in steps[self.stage_id] for _, buffer in step if buffer is not None)
            return max(2, 1 + max(found, default=0))

    return OrderedSchedule


def deepspeed_seconds(schedule: Schedule, cost: CostModel) -> float:
    """The length of a step in which DeepSpeed executes the order of `deepspeed_schedule`, in the unit of `cost`. Sends
    and receives block there: a rank waits until its peer comes to the same transfer. `simulate` computes while values
    are on their way, so it may promise more than DeepSpeed can reach.

    Raises like `deepspeed_schedule`, and UsageError for costs of fewer stages.
    """
    steps = deepspeed_steps(schedule)
    rows = [[name for step in rank for name, _ in step if name in (*KINDS, *ENDS)] for rank in steps]
    places, times, going = [0] * len(rows), [0.0] * len(rows), [*range(len(rows))]
    while going:  # ranks that may go on
        rank = going.pop()
        while places[rank] < len(rows[rank]):
            name = rows[rank][places[rank]]
            if name in KINDS:
                times[rank] += cost.duration(KINDS[name], rank)
            else:
                other, way = ENDS[name]
                peer = rank + way
                if rows[peer][places[peer]] != other:
                    break
                ends = (rank, peer) if name.startswith("Send") else (peer, rank)
                times[rank] = times[peer] = max(times[rank], times[peer]) + cost.transfer(min(ends), *ends)
                places[peer] += 1
                going.append(peer)
            places[rank] += 1
    return max(times)


def deepspeed_steps(schedule: Schedule) -> list[list[Step]]:
    """Per rank, its steps: each has transfers and ends with a computation. Raises like `deepspeed_schedule`."""
    _require(schedule)
    found: list[list[Step]] = [[[]] for _ in schedule.rows]
    buffers = [_Buffers() for _ in schedule.rows]
    for _, _, rank, step in sorted(_events(schedule), key=lambda event: event[:3]):
        for name, microbatch in step:
            assert microbatch is not None
            found[rank][-1].append((name, buffers[rank].of(microbatch)))
            if name == "SendGrad" or (name == "BackwardPass" and rank == 0):
                buffers[rank].free(microbatch)
            if name in ("ForwardPass", "BackwardPass"):
                found[rank].append([])
    for steps in found:
        steps[-1] += LAST
    return found


class _Buffers:
    """The buffers of a rank: a microbatch keeps the first free one."""

    def __init__(self) -> None:
        self._free: list[int] = []
        self._taken: dict[int, int] = {}
        self._made = 0

    def of(self, microbatch: int) -> int:
        if microbatch not in self._taken:
            if not self._free:
                self._free.append(self._made)
                self._made += 1
            self._taken[microbatch] = heapq.heappop(self._free)
        return self._taken[microbatch]

    def free(self, microbatch: int) -> None:
        heapq.heappush(self._free, self._taken.pop(microbatch))


def _events(schedule: Schedule) -> Iterator[Event]:
    """The computations of all ranks when they start, and the transfers before those that start at the same time."""
    timeline = simulate(schedule)
    starts = {span.action: span.start for span in timeline}
    last = len(schedule.rows) - 1
    for span in timeline:
        rank, many, kind = span.rank, span.action.microbatch, span.action.kind
        if kind is Kind.F:
            loads: Step = [("LoadMicroBatch", many)] if rank in (0, last) else []
            yield span.start, 1, rank, [*loads, ("ForwardPass", many)]
            if rank < last:
                made = span.end if rank + 1 < last else starts[Action(Kind.F, last, many)]
                yield made, 0, rank, [("SendActivation", many)]
                yield made, 0, rank + 1, [("RecvActivation", many)]
        else:
            yield span.start, 1, rank, [("BackwardPass", many)]
            if rank > 0:
                needed = starts[Action(Kind.B, rank - 1, many)]
                yield needed, 0, rank, [("SendGrad", many)]
                yield needed, 0, rank - 1, [("RecvGrad", many)]


def _require(schedule: Schedule) -> None:
    """Raises UsageError for an order that DeepSpeed's engine cannot execute."""
    ranks = len(schedule.rows)
    if schedule.placement != Placement.looped(ranks, 1):
        raise UsageError(f"DeepSpeed has one stage on each rank, and {schedule.name} has another placement")
    rows = [[entry for entry in row if isinstance(entry, Action)] for row in schedule.without_reductions().rows]
    if schedule.has_pairs or any(each.kind not in (Kind.F, Kind.B) for row in rows for each in row):
        raise UsageError(f"DeepSpeed has only forwards and whole backwards, and {schedule.name} has other actions")
    forwards = [[each.microbatch for each in row if each.kind is Kind.F] for row in rows]
    if any(each != forwards[0] for each in forwards):
        raise UsageError(f"DeepSpeed loads batches in one order, and {schedule.name} has several orders of forwards")
    kinds = [each.kind for each in rows[-1]]
    if kinds != [Kind.F, Kind.B] * (len(kinds) // 2):
        raise UsageError(
            f"DeepSpeed keeps one loss, so on the last rank each backward must follow its forward, unlike in "
            f"{schedule.name}"
        )
