from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeflow.core.action import Action, Kind, Pair, actions_of, parse_entry
from pipeflow.core.errors import ScheduleError, UsageError

numbers = st.integers(0, 10**9 - 1)
actions = st.builds(Action, st.sampled_from(Kind), numbers, numbers)
pairs = st.builds(
    Pair,
    st.builds(Action, st.just(Kind.F), numbers, numbers),
    st.builds(Action, st.sampled_from([Kind.B, Kind.I]), numbers, numbers),
)


@given(actions | pairs)
def test_an_entry_is_read_back_from_its_text(entry: Action | Pair) -> None:
    assert parse_entry(str(entry)) == entry


REFUSED = [
    "", " ", "F", "0F", "F0", "00", "0f0", "0X0", "-1F0", "0F-1", "+0F0", "0F0 ", " 0F0", "0F0\n", "0 F0",
    "1F0garbage", "0B1B2", "0F0F0", "0.0F0", "0F1e3", "٣F0", "0F²", "0F" + "1" * 5000,
    "()OVERLAP_F_B", "(0F0)OVERLAP_F_B", "(0F0;1B0)", "(0F0;1B0)OVERLAP_F_B2", "0F0;1B0", "(0F0;1B0;2B0)OVERLAP_F_B",
    "(0F0;)OVERLAP_F_B", "(1B0;0F0)OVERLAP_F_B", "(0F0;1F0)OVERLAP_F_B", "(0F0;1W0)OVERLAP_F_B",
    "((0F0;1B0)OVERLAP_F_B;1B0)OVERLAP_F_B",
]  # fmt: skip


@pytest.mark.parametrize("text", REFUSED, ids=lambda text: text[:24] or "empty")
def test_what_is_not_exactly_one_entry_is_refused(text: str) -> None:
    with pytest.raises(ScheduleError):
        parse_entry(text)


def test_the_error_says_what_was_read_and_what_an_action_looks_like() -> None:
    with pytest.raises(ScheduleError, match=r"'1F0garbage' is not an action: .* like 2F0"):
        Action.parse("1F0garbage")


@pytest.mark.parametrize(("stage", "microbatch"), [(-1, 0), (0, -1)])
def test_stages_and_microbatches_count_from_zero(stage: int, microbatch: int) -> None:
    with pytest.raises(ScheduleError, match="count from 0"):
        Action(Kind.F, stage, microbatch)


def test_a_pair_is_a_forward_and_then_a_backward() -> None:
    forward, backward = Action(Kind.F, 0, 4), Action(Kind.B, 3, 1)
    assert str(Pair(forward, backward)) == "(0F4;3B1)OVERLAP_F_B"
    assert actions_of(Pair(forward, backward)) == (forward, backward)
    for first, second in [(backward, forward), (forward, forward), (forward, Action(Kind.W, 3, 1))]:
        with pytest.raises(ScheduleError, match=r"it takes a forward .*, then a backward"):
            Pair(first, second)


def test_schedule_errors_are_usage_errors_and_value_errors() -> None:
    with pytest.raises(UsageError):
        Action.parse("?")
    with pytest.raises(ValueError, match="not an action"):
        Action.parse("?")
