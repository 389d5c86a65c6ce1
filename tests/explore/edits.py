"""Edits of rows, as a reader makes them."""

from __future__ import annotations

from typing import NamedTuple

from hypothesis import strategies as st

from pipeflow.core.schedule import Schedule

Rows = list[list[str]]
FOREIGN = ("0F0", "1F1", "3B2", "99F0", "2I1", "2W1", "0F8", "(0F1;1B0)OVERLAP_F_B", "1R3")


class Edit(NamedTuple):
    """One edit. The numbers say where; they may be larger than the rows are."""

    kind: str
    rank: int
    position: int
    other_rank: int
    other_position: int

    def apply(self, rows: Rows) -> None:
        """Changes the rows; an edit that needs an entry where there is none changes nothing."""
        row, other = rows[self.rank % len(rows)], rows[self.other_rank % len(rows)]
        if self.kind == "insert":
            row.insert(self.position % (len(row) + 1), FOREIGN[self.other_position % len(FOREIGN)])
        elif self.kind == "clear":
            row.clear()
        elif row and self.kind == "swap" and other:
            here, there = self.position % len(row), self.other_position % len(other)
            row[here], other[there] = other[there], row[here]
        elif row:
            entry = row[self.position % len(row)]
            if self.kind != "duplicate":
                row.remove(entry)
            if self.kind != "remove":
                other.insert(self.other_position % (len(other) + 1), entry)


NUMBER = st.integers(0, 1000)
KINDS = st.sampled_from(["move", "swap", "remove", "insert", "duplicate"] * 4 + ["clear"])
EDITS = st.lists(st.builds(Edit, KINDS, NUMBER, NUMBER, NUMBER, NUMBER), max_size=6)


def edited(schedule: Schedule, edits: list[Edit]) -> Rows:
    """The rows of a schedule after edits, as texts."""
    rows = [[str(entry) for entry in row] for row in schedule.rows]
    for edit in edits:
        edit.apply(rows)
    return rows
