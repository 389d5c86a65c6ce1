"""A lowered schedule as a table: computations with the sends and receives between them, in the words of
torch.distributed.pipelining. Must not contain: the programs of pipeflow's own engine, which `lower` makes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from pipeflow.analysis.simulation import simulate
from pipeflow.core.action import Action, Entry, Kind, actions_of
from pipeflow.core.dataflow import PASSING, Content, Stream, makes, stream_of
from pipeflow.core.errors import UsageError
from pipeflow.core.lasting import HANDLING
from pipeflow.core.schedule import Schedule
from pipeflow.core.table_cells import cells

LETTERS = {Content.ACTIVATION: "F", Content.GRADIENT: "B"}


def lowered_csv(schedule: Schedule) -> str:
    """The schedule as CSV with its sends, receives and reductions, one line per rank, as torch's `_load_csv` reads it
    with the format "compute_comms". In a reduction, torch divides gradients by the number of microbatches, also without
    replicas. The weights of stages without unshards are gathered before their first action and freed after their last
    one (UNSHARD, RESHARD), which does nothing in torch to stages that are not sharded.

    Each transfer is written into both rows at the moment when its value is made. So two ranks have their transfers in
    the same order, as one communicator for both of them needs.

    Raises UsageError for a schedule of two directions, which torch has none of, and ScheduleError for one that cannot
    run to its end.
    """
    placement, schedule = schedule.placement, schedule.with_reductions()
    schedule = replace(schedule, rows=tuple(map(_whole_throughout, schedule.rows)))
    if len(placement.paths) > 1:
        raise UsageError(f"{schedule.name} has each stage on two ranks, which torch.distributed.pipelining cannot say")
    texts = [list(cells(row)) for row in schedule.rows]
    lines: list[list[str]] = [[] for _ in schedule.rows]
    for rank, place in _in_order(schedule):
        entry, line = schedule.rows[rank][place], lines[rank]
        line.append(texts[rank][place])
        for value in (value for action in actions_of(entry) for value in makes(action, placement.num_stages)):
            if value.content in LETTERS:
                user = value.stage + PASSING[value.content]
                if (peer := placement.rank_of(user)) != rank:
                    line.append(f"{value.stage}SEND_{LETTERS[value.content]}{value.microbatch}")
                    lines[peer].append(f"{user}RECV_{LETTERS[value.content]}{value.microbatch}")
    return "".join(",".join(line) + "\n" for line in lines)


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
