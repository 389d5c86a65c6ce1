"""Schedule: who computes what, in which order. Nothing here says when, or who sends what to whom."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pipeflow.core.action import Action, Entry, Kind, actions_of
from pipeflow.core.dataflow import Stream, stream_of
from pipeflow.core.errors import ScheduleError, UsageError
from pipeflow.core.notebook import Shown
from pipeflow.core.placed import placement_of
from pipeflow.core.placement import Placement, require_positive
from pipeflow.core.reductions import cells, is_reduction, parse_cell, reduced


@dataclass(frozen=True, slots=True, repr=False)
class Schedule(Shown):
    """Per rank, the order of its actions. A value: made once, never changed, compared by content.

    A schedule may be unsound; `pipeflow.verify` lists what is wrong. Construction only checks its form:
    it raises ScheduleError when there is not one row per rank of the placement.
    """

    name: str
    placement: Placement
    num_microbatches: int
    rows: tuple[tuple[Entry, ...], ...]

    def __post_init__(self) -> None:
        require_positive(num_microbatches=self.num_microbatches)
        if len(self.rows) != self.placement.num_ranks:
            raise ScheduleError(
                f"schedule {self.name!r} has {len(self.rows)} rows for a placement on {self.placement.num_ranks} ranks"
            )

    def __repr__(self) -> str:
        placement = self.placement
        sizes = f"{placement.num_ranks} ranks, {placement.num_stages} stages, {self.num_microbatches} microbatches"
        return f"<Schedule {self.name!r}: {sizes}>"

    def __str__(self) -> str:
        return "\n".join(f"rank {rank}: {' '.join(map(str, row))}" for rank, row in enumerate(self.rows))

    def actions(self, rank: int) -> Iterator[Action]:
        """The actions of one rank, in order, pairs taken apart."""
        for entry in self.rows[rank]:
            yield from actions_of(entry)

    @property
    def is_forward_only(self) -> bool:
        """Whether every action is a forward."""
        return all(action.kind is Kind.F for rank in range(len(self.rows)) for action in self.actions(rank))

    @property
    def streams(self) -> frozenset[Stream]:
        """Those that anything in it runs on."""
        return frozenset(stream_of(entry) for row in self.rows for entry in row)

    def forward_only(self) -> Schedule:
        """The same schedule without its backwards, for evaluation: sound whenever this one is, since a
        forward needs forwards alone.
        """
        rows = tuple(
            tuple(action for action in self.actions(rank) if action.kind is Kind.F) for rank in range(len(self.rows))
        )
        return Schedule(f"{self.name} (forward only)", self.placement, self.num_microbatches, rows)

    def without_pairs(self) -> Schedule:
        """The same schedule with every pair taken apart: its forward, then its backward. Sound whenever this one is."""
        rows = tuple(tuple(self.actions(rank)) for rank in range(len(self.rows)))
        return Schedule(self.name, self.placement, self.num_microbatches, rows)

    def with_reductions(self) -> Schedule:
        """The same schedule in which each rank reduces the weight gradients of its stages, each right after the stage's
        last one there: for data parallelism, and for stages that several ranks hold. Reductions that are there already
        stay where they are. Sound whenever this one is; without backwards it is the same.
        """
        if self.is_forward_only:
            return self
        return Schedule(self.name, self.placement, self.num_microbatches, tuple(map(reduced, self.rows)))

    def without_reductions(self) -> Schedule:
        """The same schedule without its reductions. Sound whenever this one is."""
        rows = tuple(tuple(entry for entry in row if not is_reduction(entry)) for row in self.rows)
        return Schedule(self.name, self.placement, self.num_microbatches, rows)

    def first(self, microbatches: int) -> Schedule:
        """The same schedule for its first microbatches alone, all if there are no more; without its reductions, where
        some are left out, and with pairs taken apart that lose a half. Sound whenever this one is, since no microbatch
        needs another.
        """
        if microbatches >= self.num_microbatches:
            return self
        rows = tuple(tuple(_within(row, microbatches)) for row in self.without_reductions().rows)
        return Schedule(self.name, self.placement, microbatches, rows)

    def to_csv(self) -> str:
        """One line a rank, one cell an entry, in the format of torch.distributed.pipelining, whose `_load_csv` takes
        tables `without_reductions()` alone: it adds them itself, in the places of `with_reductions()`.
        """
        return "".join(",".join(cells(row)) + "\n" for row in self.rows)

    @classmethod
    def from_csv(
        cls, text: str, placement: Placement | None = None, num_microbatches: int | None = None, *, name: str = "csv"
    ) -> Schedule:
        """Reads `to_csv`'s format; empty cells (torch writes them for idle time) are skipped, and so are blank lines
        before and after the table. A reduction without a microbatch, as torch writes it (`2REDUCE_GRAD`), has that of
        its stage's last weight gradient before it.

        Without `placement` it is the one that the rows show: each stage is on the rank in whose line it stands. Where
        no placement explains them, the stages are looped over the ranks, and `verify` says what is wrong. Without
        `num_microbatches` it is the largest microbatch + 1.

        Raises ScheduleError naming line, cell and what was read, or saying which argument does not fit.
        """
        rows = tuple(_parse_lines(text))
        actions = [action for row in rows for entry in row for action in actions_of(entry)]
        stages = max(action.stage for action in actions) + 1
        largest = max(action.microbatch for action in actions) + 1
        if max(stages, largest) > len(actions):
            raise ScheduleError(
                f"the CSV has {len(actions)} actions for {stages} stages and {largest} microbatches: "
                "each needs at least one"
            )
        if num_microbatches is not None and num_microbatches < largest:
            raise ScheduleError(f"the CSV has {largest} microbatches, not {num_microbatches}")
        if placement is None:
            placement = placement_of(rows) or _looped(len(rows), stages)
        return cls(name, placement, largest if num_microbatches is None else num_microbatches, rows)


def _within(row: tuple[Entry, ...], microbatches: int) -> Iterator[Entry]:
    for entry in row:
        left = [action for action in actions_of(entry) if action.microbatch < microbatches]
        yield from left if len(left) == 1 else [entry] * bool(left)


def _looped(ranks: int, stages: int) -> Placement:
    if stages % ranks:
        raise ScheduleError(
            f"the CSV has {stages} stages on {ranks} ranks, which no looped placement has, and its lines show no other "
            "one: every stage needs a line in which it stands alone, or two for even and odd microbatches"
        )
    return Placement.looped(ranks, stages // ranks)


def _parse_lines(text: str) -> Iterator[tuple[Entry, ...]]:
    """A row per line, but for blank ones before the first and after the last of them."""
    lines = text.rstrip().split("\n")
    first = next((number for number, line in enumerate(lines, start=1) if line.strip()), None)
    if first is None:
        raise ScheduleError("the CSV is empty: it needs one line a rank, with cells like 0F0,0F1,0B0")
    for number, line in enumerate(lines[first - 1 :], start=first):
        row = _parse_line(line, number, number - first)
        if not row:
            what = "has no action" if line.strip() else "is blank"
            raise ScheduleError(f"line {number} {what}: each line is the row of a rank, so fill it or remove it")
        yield row


def _parse_line(line: str, number: int, rank: int) -> tuple[Entry, ...]:
    entries: list[Entry] = []
    for column, cell in enumerate(line.split(","), start=1):
        if text := cell.strip():
            try:
                entries.append(parse_cell(text, entries))
            except UsageError as error:
                raise ScheduleError(f"line {number} (rank {rank}), cell {column}: {error}") from None
    return tuple(entries)
