"""A lowered schedule as a table: computations with the sends and receives between them, in the words of
torch.distributed.pipelining. Must not contain: the programs of pipeflow's own engine, which `lower` makes.
"""

from __future__ import annotations

from collections.abc import Iterator

from pipeflow.analysis.simulation import simulate
from pipeflow.core.action import actions_of
from pipeflow.core.dataflow import PASSING, Content, Stream, makes, stream_of
from pipeflow.core.errors import UsageError
from pipeflow.core.reductions import cells
from pipeflow.core.schedule import Schedule

LETTERS = {Content.ACTIVATION: "F", Content.GRADIENT: "B"}


def lowered_csv(schedule: Schedule) -> str:
    """The schedule as CSV with its sends, receives and reductions, one line per rank, as torch's `_load_csv` reads it
    with the format "compute_comms". In a reduction, torch divides gradients by the number of microbatches, also without
    replicas. Weights are gathered before the first action of a stage and freed after its last one (UNSHARD, RESHARD),
    which does nothing to stages that are not sharded.

    Each transfer is written into both rows at the moment when its value is made. So two ranks have their transfers in
    the same order, as one communicator for both of them needs.

    Raises UsageError for a schedule of two directions, which torch has none of, and ScheduleError for one that cannot
    run to its end.
    """
    placement, schedule = schedule.placement, schedule.with_reductions()
    if len(placement.paths) > 1:
        raise UsageError(f"{schedule.name} has each stage on two ranks, which torch.distributed.pipelining cannot say")
    texts = [list(cells(row)) for row in schedule.rows]
    lines: list[list[str]] = [[] for _ in schedule.rows]
    last = [_last_places(schedule, rank) for rank in range(placement.num_ranks)]
    gathered: set[int] = set()
    for rank, place in _in_order(schedule):
        entry, line = schedule.rows[rank][place], lines[rank]
        own = sorted({action.stage for action in actions_of(entry)})
        line += (f"{stage}UNSHARD" for stage in own if stage not in gathered)
        gathered.update(own)
        line.append(texts[rank][place])
        line += (f"{stage}RESHARD" for stage in own if last[rank][stage] == place)
        for value in (value for action in actions_of(entry) for value in makes(action, placement.num_stages)):
            if value.content in LETTERS:
                user = value.stage + PASSING[value.content]
                if (peer := placement.rank_of(user)) != rank:
                    line.append(f"{value.stage}SEND_{LETTERS[value.content]}{value.microbatch}")
                    lines[peer].append(f"{user}RECV_{LETTERS[value.content]}{value.microbatch}")
    return "".join(",".join(line) + "\n" for line in lines)


def _last_places(schedule: Schedule, rank: int) -> dict[int, int]:
    """Per stage, the place of the last entry of the rank that has it."""
    return {action.stage: place for place, entry in enumerate(schedule.rows[rank]) for action in actions_of(entry)}


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
