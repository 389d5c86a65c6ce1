"""Schedule: which rank computes what, in which order. Must not contain: times, and who sends what to whom."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

from pipeflow.core.action import Action, Entry, Kind, Pair, actions_of
from pipeflow.core.dataflow import DATAFLOW, SEVERAL, Stream
from pipeflow.core.errors import ScheduleError, UsageError, require_type
from pipeflow.core.placement import Placement, require_positive
from pipeflow.core.rows import cells, is_communication, last_made, parse_cell, placement_of, reduced
from pipeflow.core.text import Shown


@dataclass(frozen=True, repr=False)  # no slots: `kinds` is kept
class Schedule(Shown):
    """An order of actions for each rank. A schedule is immutable and compared by content.

    A schedule may be unsound: `pipeflow.verify` lists what is wrong. The constructor checks the form only.

    Attributes:
        name: name for drawings, tables and errors.
        placement: which rank holds which stage.
        num_microbatches: number of microbatches per step.
        rows: per rank, its actions and pairs in order.
        slices: into how many slices of its sequence each microbatch is cut. 1: microbatches are whole.
        of_survivors: makes the schedule of the ranks that are left of a number of replicas without some ranks.

    Raises ScheduleError unless there is one row per rank of the placement.
    """

    name: str
    placement: Placement
    num_microbatches: int
    rows: tuple[tuple[Entry, ...], ...]
    slices: int = 1
    of_survivors: ClassVar[Callable[[Schedule, int, Collection[int]], Schedule] | None] = None

    def __post_init__(self) -> None:
        require_positive(num_microbatches=self.num_microbatches, slices=self.slices)
        if len(self.rows) != self.placement.num_ranks:
            raise ScheduleError(
                f"schedule {self.name!r} has {len(self.rows)} rows for a placement on {self.placement.num_ranks} ranks"
            )

    def __repr__(self) -> str:
        placement = self.placement
        sizes = f"{placement.num_ranks} ranks, {placement.num_stages} stages, {self.num_microbatches} microbatches"
        sizes += f" of {self.slices} slices" * (self.slices > 1)
        return f"<Schedule {self.name!r}: {sizes}>"

    def __str__(self) -> str:
        return "\n".join(f"rank {rank}: {' '.join(map(str, row))}" for rank, row in enumerate(self.rows))

    def actions(self, rank: int) -> Iterator[Action]:
        """The actions of one rank, in order. A pair gives its forward, then its backward."""
        for entry in self.rows[rank]:
            yield from actions_of(entry)

    @property
    def is_forward_only(self) -> bool:
        """Whether every action is a forward."""
        return self.kinds <= {Kind.F}

    @property
    def has_pairs(self) -> bool:
        """Whether any entry is a pair."""
        return any(isinstance(entry, Pair) for row in self.rows for entry in row)

    @cached_property
    def kinds(self) -> frozenset[Kind]:
        """The kinds of its actions."""
        return frozenset(action.kind for row in self.rows for entry in row for action in actions_of(entry))

    @property
    def streams(self) -> frozenset[Stream]:
        """The streams that its actions run on."""
        return frozenset(DATAFLOW[kind].stream for kind in self.kinds)

    def forward_only(self) -> Schedule:
        """The same schedule without backwards, for evaluation. It is sound if this schedule is, since a forward needs
        only forwards.
        """
        others = set(Kind) - {Kind.F}
        return replace(self.without_pairs().without(*others), name=f"{self.name} (forward only)")

    def without_pairs(self) -> Schedule:
        """The same schedule with every pair replaced by its forward, then its backward. It is sound if this schedule
        is.
        """
        return replace(self, rows=tuple(tuple(self.actions(rank)) for rank in range(len(self.rows))))

    def with_reductions(self) -> Schedule:
        """The same schedule with a reduction directly after the last weight gradient of each stage on each rank: for
        data parallelism, and for stages that several ranks hold. Existing reductions stay where they are. The result is
        sound if this schedule is. A schedule without backwards is returned as it is.
        """
        return self if self.is_forward_only else replace(self, rows=tuple(map(reduced, self.rows)))

    def without_reductions(self) -> Schedule:
        """The same schedule without reductions. It is sound if this schedule is."""
        return self.without(Kind.R)

    def without_unshards(self) -> Schedule:
        """The same schedule without unshards and reshards. It is sound if this schedule is: fully_shard then gathers
        weights itself, for each forward and backward.
        """
        return self.without(Kind.U, Kind.H)

    def without(self, *kinds: Kind) -> Schedule:
        """The same schedule without the actions of these kinds that are in no pair."""
        rows = (
            tuple(entry for entry in row if isinstance(entry, Pair) or entry.kind not in kinds) for row in self.rows
        )
        return replace(self, rows=tuple(rows))

    def with_ranks(self, ranks: Sequence[int]) -> Schedule:
        """The same schedule with `ranks[r]` in the place of rank r."""
        rows = tuple(self.rows[ranks.index(rank)] for rank in range(len(self.rows)))
        return replace(self, placement=self.placement.with_ranks(ranks), rows=rows)

    def first(self, microbatches: int) -> Schedule:
        """The same schedule for its first `microbatches` alone; the schedule itself if it has no more than that. If
        microbatches are left out, reductions and optimizer steps wait for those that are left, unshards and reshards
        are left out, too, and a pair that loses one action becomes the other action. The result is sound if this
        schedule is, since microbatches do not depend on each other.
        """
        if microbatches >= self.num_microbatches:
            return self
        rows = tuple(tuple(_ending(_within(row, microbatches))) for row in self.rows)
        return replace(self, num_microbatches=microbatches, rows=rows)

    def to_csv(self) -> str:
        """The schedule as CSV in the format of torch.distributed.pipelining: one line per rank, one cell per entry.

        torch's `_load_csv` reads only tables without reductions and unshards. It adds reductions itself, in the same
        places as `with_reductions()`, and unshards as `with_unshard` does. An action of a slice has the slice after a
        point, such as `2F0.3`, which torch does not read.
        """
        return "".join(",".join(cells(row)) + "\n" for row in self.rows)

    @classmethod
    def from_csv(
        cls, text: str, placement: Placement | None = None, num_microbatches: int | None = None, *, name: str = "csv"
    ) -> Schedule:
        """Reads the format of `to_csv`.

        Empty cells, which torch writes for idle time, are skipped, and so are blank lines before and after the table. A
        reduction without a microbatch, as torch writes it (`2REDUCE_GRAD`), gets the microbatch of its stage's last
        weight gradient before it. Unshards and reshards (`2UNSHARD`, `2RESHARD`) are numbered per stage. Sends and
        receives in a lowered table are skipped: they follow from the computations.

        Args:
            text: the table.
            placement: which rank holds which stage. With None, each stage is on the rank of the line that contains it.
                If no placement fits the lines, stages are looped over the ranks, and `verify` says what is wrong.
            num_microbatches: number of microbatches. None: the largest microbatch + 1.
            name: name of the schedule.

        Raises ScheduleError that names the line, the cell and its text, or the argument that does not fit.
        """
        rows = tuple(_parse_lines(text))
        actions = [action for row in rows for entry in row for action in actions_of(entry)]
        stages = max(action.stage for action in actions) + 1
        largest = max((action.microbatch for action in actions if action.kind not in SEVERAL), default=0) + 1
        if max(stages, largest) > len(actions):
            raise ScheduleError(
                f"the CSV has {len(actions)} actions for {stages} stages and {largest} microbatches: "
                "each needs at least one"
            )
        if num_microbatches is not None and num_microbatches < largest:
            raise ScheduleError(f"the CSV has {largest} microbatches, not {num_microbatches}")
        if placement is None:
            placement = placement_of(rows) or _looped(len(rows), stages)
        slices = slices_of(actions)
        if slices > len(actions):
            raise ScheduleError(f"the CSV has {len(actions)} actions for {slices} slices: each needs at least one")
        return cls(name, placement, largest if num_microbatches is None else num_microbatches, rows, slices)


def slices_of(actions: Iterable[Action]) -> int:
    """Into how many slices each microbatch of these actions is cut: the largest slice + 1; 1 if none has a slice."""
    return max((each.slice for each in actions if each.slice is not None), default=0) + 1


def _within(row: tuple[Entry, ...], microbatches: int) -> Iterator[Entry]:
    for entry in row:
        left = [each for each in actions_of(entry) if _ends(each) or each.microbatch < microbatches]
        left = [each for each in left if _ends(each) or each.kind not in SEVERAL]
        yield from left if len(left) == 1 else [entry] * bool(left)


def _ends(action: Action) -> bool:
    return action.kind in (Kind.R, Kind.S)


def _ending(entries: Iterator[Entry]) -> Iterator[Entry]:
    """The row, in which reductions and optimizer steps wait for the last weight gradient that it makes."""
    row = list(entries)
    last = last_made(row)
    for entry in row:
        if not (isinstance(entry, Action) and _ends(entry)):
            yield entry
        elif entry.stage in last:
            yield last[entry.stage].used_by(entry.kind, entry.stage)


def _looped(ranks: int, stages: int) -> Placement:
    if stages % ranks:
        raise ScheduleError(
            f"the CSV has {stages} stages on {ranks} ranks, which fit no looped placement, and its lines show no other "
            "one: put every stage in one line, or in n lines, of which microbatch m is in line m modulo n"
        )
    return Placement.looped(ranks, stages // ranks)


def _parse_lines(text: str) -> Iterator[tuple[Entry, ...]]:
    """One row per line. Blank lines before the first row and after the last one are skipped."""
    lines = text.rstrip().split("\n")
    first = next((number for number, line in enumerate(lines, start=1) if line.strip()), None)
    if first is None:
        raise ScheduleError("the CSV is empty: it needs one line per rank, with cells like 0F0,0F1,0B0")
    for number, line in enumerate(lines[first - 1 :], start=first):
        row = _parse_line(line, number, number - first)
        if not row:
            what = "has no action" if line.strip() else "is blank"
            raise ScheduleError(f"line {number} {what}: each line is the row of a rank, so fill it or remove it")
        yield row


def _parse_line(line: str, number: int, rank: int) -> tuple[Entry, ...]:
    entries: list[Entry] = []
    for column, cell in enumerate(line.split(","), start=1):
        if (text := cell.strip()) and not is_communication(text):
            try:
                entries.append(parse_cell(text, entries))
            except UsageError as error:
                raise ScheduleError(f"line {number} (rank {rank}), cell {column}: {error}") from None
    return tuple(entries)


def require_unsliced(schedule: Schedule, who: str) -> None:
    """Raises UsageError for a schedule with slices, which `who` cannot take yet."""
    if schedule.slices > 1:
        raise UsageError(
            f"{who} cannot take slices of microbatches yet, and schedule {schedule.name!r} has {schedule.slices} of "
            "each: make it with slices=1"
        )


def require_schedule(schedule: object) -> None:
    """Raises UsageError for anything that is no Schedule, such as its name."""
    require_type("schedule", schedule, Schedule, f"make_schedule({schedule!r}, ...)")
