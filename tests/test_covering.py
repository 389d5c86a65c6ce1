"""What `make test` leaves out of a matrix has no pair of values that it does not try."""

from __future__ import annotations

from itertools import combinations, product
from typing import Any

import pytest

from tests.covering import LEFT_OUT, Row, covering, halved, spaced, thinned

ROOT = LEFT_OUT.parent.parent
COLUMNS = ("abcd", (1, 2, 3), ({"x": 1}, {"x": 2}), (True, False))


def possible(letter: str, number: int, *_: object) -> bool:
    return (letter, number) != ("a", 3)


def pairs(rows: list[Row]) -> set[Any]:
    return {
        pair for row in rows for pair in combinations([(column, str(value)) for column, value in enumerate(row)], 2)
    }


def test_every_pair_that_is_possible_is_there() -> None:
    every = [row for row in product(*COLUMNS) if possible(*row)]
    found = covering(*COLUMNS, possible=possible)
    assert pairs(found) == pairs(every)
    assert all(row in every for row in found)
    assert len(found) < len(every) / 2


def test_a_column_may_be_tried_singly() -> None:
    found = covering(*COLUMNS, possible=possible, singly=[0])
    assert pairs([row[1:] for row in found]) == pairs(list(product(*COLUMNS[1:])))
    assert {row[0] for row in found} == set(COLUMNS[0])
    assert len(found) < len(covering(*COLUMNS, possible=possible))


def test_two_columns_are_tried_whole() -> None:
    assert covering("ab", "cd") == list(product("ab", "cd"))


def test_the_rest_is_exhaustive() -> None:
    parameters = thinned(*COLUMNS, possible=possible)
    assert [each.values for each in parameters] == [row for row in product(*COLUMNS) if possible(*row)]
    kept = [each.values for each in parameters if pytest.mark.exhaustive not in each.marks]
    assert kept == covering(*COLUMNS, possible=possible)


def test_half_of_a_matrix_has_all_that_three_of_four_columns_can_have() -> None:
    every, kept = list(product(*COLUMNS)), [("b", 1, {"x": 1}, True)]  # an odd one
    found = halved(*COLUMNS, kept=kept)
    rows = [each.values for each in found]
    assert len(rows) == len(every) / 2 + 1
    assert [each.values for each in found if pytest.mark.exhaustive not in each.marks] == kept
    for left_out in range(4):
        shorter = [[str(row[:left_out] + row[left_out + 1 :]) for row in those] for those in (rows, every)]
        assert set(shorter[0]) == set(shorter[1])


@pytest.mark.parametrize(
    ("number", "total", "kept"), [(1, 9, {0}), (3, 9, {0, 3, 6}), (4, 10, {0, 2, 5, 7}), (5, 3, {0, 1, 2})]
)
def test_cases_that_are_kept_are_evenly_spaced(number: int, total: int, kept: set[int]) -> None:
    assert spaced(number, total) == kept


@pytest.mark.lint
def test_what_is_left_out_by_name_exists() -> None:
    """A case that has another name now is run again; a test that does not exist any more is a line too many."""
    files: dict[str, str] = {}
    for line in LEFT_OUT.read_text(encoding="utf-8").splitlines():
        file, *_, function = line.partition("[")[0].split("::")
        if file not in files:
            path = ROOT / file
            files[file] = path.read_text(encoding="utf-8") if path.exists() else ""
        assert f"def {function}(" in files[file] or not file.startswith("tests/"), f"there is no {line}"
