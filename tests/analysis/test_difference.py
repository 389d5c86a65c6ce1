from __future__ import annotations

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from pipeflow.core.action import Action, Kind, parse_entry
from pipeflow.core.analysis.difference import Difference, Move, differences, has_halves, longest_rising, without_halves
from pipeflow.schedules import make_schedule


def row(text: str) -> tuple[Action, ...]:
    return tuple(Action.parse(cell) for cell in text.split())


def test_a_difference_names_the_first_position_the_moves_and_what_is_in_one_row_alone() -> None:
    found = Difference(row("0F0 0F1 0F2 0F3 0B0"), row("0F0 0B0 0F1 0F2 0B1"))
    assert found.position == 1
    assert found.moves == [Move(Action(Kind.B, 0, 0), 4, 1)]
    assert found.only_first == [Action(Kind.F, 0, 3)]
    assert found.only_second == [Action(Kind.B, 0, 1)]


def test_a_row_that_goes_on_differs_at_the_end_of_the_other() -> None:
    found = Difference(row("0F0"), row("0F0 0B0"))
    assert (found.position, found.moves, found.only_first) == (1, [], [])


def test_ranks_with_equal_rows_do_not_differ() -> None:
    first, second = (make_schedule(name, ranks=2, microbatches=4) for name in ("1f1b", "gpipe"))
    assert differences(first, first) == [None, None]
    assert all(differences(first, second))


def test_halves_become_whole_backwards() -> None:
    split = make_schedule("zb-h1", ranks=4, microbatches=8)
    whole = without_halves(split)
    assert has_halves(split)
    assert not has_halves(whole)
    kinds = [action.kind for action in whole.actions(0)]
    assert kinds.count(Kind.B) == kinds.count(Kind.F) == 8


def test_halves_in_pairs_become_whole_too() -> None:
    schedule = make_schedule("dualpipe", ranks=4, microbatches=8)
    assert parse_entry("(0F4;0I0)OVERLAP_F_B") not in without_halves(schedule).rows[0]
    assert not any(action.kind is Kind.I for rank in range(4) for action in without_halves(schedule).actions(rank))


@given(st.permutations(range(7)))
def test_the_longest_rising_subsequence_by_its_definition(numbers: list[int]) -> None:
    rising = [chosen for size in range(8) for chosen in combinations(numbers, size) if list(chosen) == sorted(chosen)]
    found = longest_rising(numbers)
    assert len(found) == max(map(len, rising))
    assert tuple(number for number in numbers if number in found) in rising
