"""Verify is tested by what it rejects: every mutation of every schedule, judged by an oracle of its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

import pytest

from pipeflow.core.action import Action, Entry, Kind, actions_of
from pipeflow.core.analysis.lowering import lower
from pipeflow.core.analysis.order import dependency_graph
from pipeflow.core.analysis.simulation import simulate
from pipeflow.core.errors import ScheduleError, UsageError, Violation
from pipeflow.core.placement import Placement
from pipeflow.core.schedule import Schedule
from pipeflow.core.soundness.verification import verify
from pipeflow.schedules import SCHEDULES, make_schedule
from tests.covering import thinned
from tests.families import make_near

Rows = tuple[tuple[Entry, ...], ...]
Mutation = Callable[[Rows], Iterator[Rows]]

ZERO_BUBBLE = Schedule.from_csv(
    "0F0,0F1,0I0,0W0,0F2,0I1,0W1,0I2,0W2\n1F0,1I0,1F1,1I1,1W0,1F2,1I2,1W1,1W2", name="zero bubble"
)
PAIRED = Schedule.from_csv("0F0,0F1,(0F2;0B0)OVERLAP_F_B,0B1,0B2\n1F0,1B0,1F1,(1F2;1B1)OVERLAP_F_B,1B2", name="paired")
VEE = Schedule.from_csv(
    "0F0,0F1,3F0,3B0,3F1,3B1,0B0,0B1\n1F0,2F0,1F1,2F1,2B0,1B0,2B1,1B1", Placement.vee(2), name="vee"
)
TWO_WAYS = Schedule.from_csv(
    "0F0,1F1,1B1,0F2,(1F3;0B0)OVERLAP_F_B,1I3,0I2,0W2,1W3\n1F0,1B0,0F1,(1F2;0B1)OVERLAP_F_B,0F3,1I2,0I3,1W2,0W3",
    Placement.bidirectional(2),
    name="two ways",
)
BY_HAND = (ZERO_BUBBLE, PAIRED, VEE, TWO_WAYS)


def sound(schedule: Schedule) -> bool:
    """The definition, with no regard for speed: the right actions, each once, on the rank of its stage, and
    running whatever can run reaches the end."""
    if not reduces(schedule):
        return False
    stages, microbatches = schedule.placement.num_stages, schedule.num_microbatches
    whole, schedule = schedule, schedule.without_reductions()
    counts = Counter(str(action) for rank in range(len(schedule.rows)) for action in schedule.actions(rank))
    if not counts or max(counts.values()) > 1:
        return False
    present = set(counts)
    forward_only = all("F" in text for text in present)
    for stage in range(stages):
        for microbatch in range(microbatches):
            has = {kind for kind in "FBIW" if f"{stage}{kind}{microbatch}" in present}
            if has not in ([{"F"}] if forward_only else [{"F", "B"}, {"F", "I", "W"}]):
                return False
            present -= {f"{stage}{kind}{microbatch}" for kind in has}
    if present:
        return False
    for rank in range(len(schedule.rows)):
        for action in schedule.actions(rank):
            path = schedule.placement.paths[action.microbatch % len(schedule.placement.paths)]
            if path[action.stage] != rank:
                return False
    return runs(whole)


def is_r(action: Action) -> bool:
    return action.kind is Kind.R


def reduces(schedule: Schedule) -> bool:
    """No reductions at all; or on each rank one per stage that has weight gradients there, after the last of these and
    with its microbatch."""
    rows = [list(schedule.actions(rank)) for rank in range(len(schedule.rows))]
    if not any(is_r(action) for row in rows for action in row):
        return True
    for row in rows:
        adding = [action for action in row if action.kind in (Kind.B, Kind.W)]
        if sorted(action.stage for action in row if is_r(action)) != sorted({action.stage for action in adding}):
            return False
        for reduction in filter(is_r, row):
            last = [action for action in adding if action.stage == reduction.stage][-1]
            if last.microbatch != reduction.microbatch or row.index(last) > row.index(reduction):
                return False
    return True


def runs(schedule: Schedule) -> bool:
    done: set[str] = set()
    rows = [list(row) for row in schedule.rows]
    moved = True
    while moved:
        moved = False
        for row in rows:
            while row and all(can_run(action, schedule.placement.num_stages, done) for action in actions_of(row[0])):
                done.update(map(str, actions_of(row.pop(0))))
                moved = True
    return not any(rows)


def can_run(action: Action, stages: int, done: set[str]) -> bool:
    stage, microbatch = action.stage, action.microbatch
    if action.kind is Kind.F:
        return stage == 0 or f"{stage - 1}F{microbatch}" in done
    if action.kind is Kind.W:
        return f"{stage}I{microbatch}" in done
    if action.kind is Kind.R:
        return bool({f"{stage}B{microbatch}", f"{stage}W{microbatch}"} & done)
    later = {f"{stage + 1}B{microbatch}", f"{stage + 1}I{microbatch}"}
    return f"{stage}F{microbatch}" in done and (stage == stages - 1 or bool(later & done))


def changed(rows: Rows, rank: int, row: tuple[Entry, ...]) -> Rows:
    return (*rows[:rank], row, *rows[rank + 1 :])


def dropped(rows: Rows) -> Iterator[Rows]:
    for rank, row in enumerate(rows):
        for position in range(len(row)):
            yield changed(rows, rank, row[:position] + row[position + 1 :])


def duplicated(rows: Rows) -> Iterator[Rows]:
    for rank, row in enumerate(rows):
        for position, entry in enumerate(row):
            yield changed(rows, rank, (*row[:position], entry, *row[position:]))
            yield changed(rows, rank, (*row, entry))


def swapped(rows: Rows) -> Iterator[Rows]:
    for rank, row in enumerate(rows):
        for first in range(len(row)):
            for second in range(first + 1, len(row)):
                order = list(row)
                order[first], order[second] = order[second], order[first]
                yield changed(rows, rank, tuple(order))


def moved(rows: Rows) -> Iterator[Rows]:
    for rank, row in enumerate(rows):
        for position, entry in enumerate(row):
            target = (rank + 1) % len(rows)
            without = changed(rows, rank, row[:position] + row[position + 1 :])
            yield changed(without, target, (*without[target][:position], entry, *without[target][position:]))


def replaced(rows: Rows) -> Iterator[Rows]:
    """Another stage, another microbatch (also ones that do not exist), another kind."""
    for rank, row in enumerate(rows):
        for position, entry in enumerate(row):
            for action in actions_of(entry)[:1]:
                others = [Action(action.kind, stage, action.microbatch) for stage in range(6)]
                others += [Action(action.kind, action.stage, microbatch) for microbatch in range(6)]
                others += [Action(kind, action.stage, action.microbatch) for kind in Kind]
                for other in others:
                    if other != action:
                        yield changed(rows, rank, (*row[:position], other, *row[position + 1 :]))


FORMS: dict[str, Callable[[str], Schedule]] = {
    "2 ranks": lambda name: make_near(name, ranks=2, microbatches=3),
    "3 ranks": lambda name: make_near(name, ranks=3, microbatches=2),
    "forwards": lambda name: make_near(name, ranks=2, microbatches=4).forward_only(),
    "reductions": lambda name: make_near(name, ranks=2, microbatches=3).with_reductions(),
}
MUTATIONS: list[Mutation] = [dropped, duplicated, swapped, moved, replaced]


@pytest.mark.some(32)
@pytest.mark.parametrize(("name", "form", "mutate"), thinned(tuple(SCHEDULES), tuple(FORMS), MUTATIONS))
@pytest.mark.slow
def test_verify_agrees_with_the_definition(name: str, form: str, mutate: Mutation) -> None:
    require_agreement(FORMS[form](name), mutate)


@pytest.mark.some(14)
@pytest.mark.parametrize("mutate", MUTATIONS)
@pytest.mark.parametrize("reduces", [False, True])
@pytest.mark.parametrize("schedule", BY_HAND, ids=lambda schedule: schedule.name)
@pytest.mark.slow
def test_verify_agrees_with_the_definition_by_hand(schedule: Schedule, reduces: bool, mutate: Mutation) -> None:
    require_agreement(schedule.with_reductions() if reduces else schedule, mutate)


def require_agreement(schedule: Schedule, mutate: Mutation) -> None:
    assert sound(schedule)
    assert verify(schedule) == []
    refused = 0
    for rows in mutate(schedule.rows):
        mutant = Schedule(schedule.name, schedule.placement, schedule.num_microbatches, rows)
        violations = verify(mutant)
        assert (violations == []) == sound(mutant), str(mutant)
        assert len(set(violations)) == len(violations), "one violation is listed twice"
        refused += bool(violations)
    assert refused or schedule.is_forward_only  # forwards alone may run in any order that the stages allow


def deadlocked() -> Schedule:
    """Each rank waits for what the other would make next: what torch.distributed.pipelining accepts."""
    return Schedule.from_csv("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0", name="deadlocked")


def test_a_deadlock_is_shown_as_its_cycle() -> None:
    (violation,) = verify(deadlocked())
    assert str(violation) == (
        "rank 0, position 1: deadlock: "
        "0B0 on rank 0 needs the gradient of 1B0, which rank 1 runs later, at position 3; "
        "1F1 on rank 1 needs the activation of 0F1, which rank 0 runs later, at position 2"
    )
    assert violation.cycle == ((0, 1), (0, 2), (1, 0), (1, 3))


def test_a_cycle_of_many_ranks_names_two_actions_of_each() -> None:
    """However long the rows: rank 3 begins with the last microbatch, for which all others would have to be done."""
    schedule = make_schedule("1f1b", ranks=4, microbatches=64)
    turned = (*schedule.rows[3][-2:], *schedule.rows[3][:-2])
    (violation,) = verify(Schedule("turned", schedule.placement, 64, (*schedule.rows[:3], turned)))
    assert len(set(violation.cycle)) == len(violation.cycle) <= 8
    assert "3F63 on rank 3 needs the activation of 2F63, which rank 2 runs later" in violation.problem
    assert violation.problem.count(" needs ") == len(violation.cycle) // 2


def test_every_cycle_is_listed() -> None:
    """Two pairs of ranks, each of which waits for itself."""
    schedule = Schedule.from_csv(
        "0F0,0B0,0F2,0B2\n1F2,1B2,1F0,1B0\n1F1,1B1,1F3,1B3\n0F3,0B3,0F1,0B1", Placement(((0, 1), (3, 2)))
    )
    assert [violation.rank for violation in verify(schedule)] == [0, 2]


def test_deadlocks_behind_one_another_are_all_listed() -> None:
    """Rank 1 begins with a backward, so that nobody comes to where rank 0 swaps its last two actions."""
    schedule = Schedule.from_csv("0F0,0F1,0B1,0B0,0B2,0F2\n1B0,1F0,1F1,1B1,1F2,1B2")
    first, second = verify(schedule)
    assert first.problem == "deadlock: 1B0 on rank 1 needs what 1F0 saves, which this rank runs later, at position 1"
    assert str(second) == (
        "rank 0, position 4: deadlock: "
        "0B2 on rank 0 needs the gradient of 1B2, which rank 1 runs later, at position 5; "
        "1F2 on rank 1 needs the activation of 0F2, which rank 0 runs later, at position 5"
    )


@pytest.mark.parametrize(
    "text",
    [
        "0F0,0B0\n(1F0;1B0)OVERLAP_F_B",  # the backward needs what its own pair saves
        "0F0,(0F1;0B0)OVERLAP_F_B,0B1\n1F0,1F1,1B0,1B1",  # the backward waits for the forward it is paired with
    ],
)
def test_a_pair_that_waits_for_itself_is_a_deadlock(text: str) -> None:
    schedule = Schedule.from_csv(text)
    assert not sound(schedule)
    (violation,) = verify(schedule)
    assert "deadlock" in violation.problem


def test_what_cannot_run_is_neither_simulated_nor_lowered() -> None:
    with pytest.raises(ScheduleError, match="these ranks are stuck: rank 0 at 0B0, rank 1 at 1F1; see verify"):
        simulate(deadlocked())
    with pytest.raises(ScheduleError, match="stuck"):
        lower(deadlocked())
    for refuse in (simulate, lower, dependency_graph):
        with pytest.raises(ScheduleError, match="rank 1: there is no 2F0 in this schedule"):
            refuse(Schedule.from_csv("0F0,0B0\n2F0,1B0", Placement.linear(2)))
    for refuse in (simulate, lower):
        with pytest.raises(ScheduleError, match="rank 0: there is no 0F2 in this schedule"):
            refuse(Schedule("few", Placement.linear(1), 2, Schedule.from_csv("0F0,0B0,0F2,0B2").rows))
        with pytest.raises(ScheduleError, match="rank 1: 0B0 belongs on rank 0, which holds its stage"):
            refuse(Schedule.from_csv("0F0\n1F0,1B0,0B0"))


@pytest.mark.parametrize(
    ("text", "messages"),
    [
        ("0F0,0B0,0B0", ["rank 0, position 2: 0B0 runs again: it is on rank 0 already, at position 1"]),
        ("0F0,0F1,0B0", ["rank 0: 0B1 is missing: stage 0 runs 0F1 for microbatch 1"]),
        ("0F0,0I0", ["rank 0: 0W0 is missing: stage 0 runs 0F0 and 0I0 for microbatch 0"]),
        ("0B0", ["rank 0: 0F0 is missing: stage 0 runs 0B0 for microbatch 0"]),
        ("0F0,0I0,0W0,0F1", ["rank 0: 0I1 and 0W1 are missing: stage 0 runs 0F1 for microbatch 1"]),
        ("0F0,0I0,0B0", ["rank 0: 0I0 should not be there: stage 0 runs 0F0, 0B0 and 0I0 for microbatch 0"]),
        ("0F0,0I0,0W0,0B0", ["rank 0: 0B0 should not be there: stage 0 runs 0F0, 0B0, 0I0 and 0W0 for microbatch 0"]),
        ("0B0,0W0", ["rank 0: 0F0 is missing, and 0W0 should not be there: stage 0 runs 0B0 and 0W0 for microbatch 0"]),
        ("0F0,0B0\n1F0,1B0,0F0", [
            "rank 1, position 2: 0F0 is on rank 1; expected it on rank 0, which holds its stage",
            "rank 1, position 2: 0F0 runs again: it is on rank 0 already, at position 0",
        ]),
        ("0F0,0B0,0F1,0B1\n1F0,1B0,1F1,1B2", [
            "rank 1, position 3: 1B2 does not exist; expected stages 0..1 and microbatches 0..1",
            "rank 1: 1B1 is missing: stage 1 runs 1F1 for microbatch 1",
        ]),
        ("0F0\n1F0,1F0", ["rank 1, position 1: 1F0 runs again: it is on rank 1 already, at position 0"]),
        ("0F0,0F1\n1F0", ["rank 1: 1F1 is missing: stage 1 runs nothing for microbatch 1"]),
    ],
)  # fmt: skip
def test_messages_name_rank_position_action_and_what_was_expected(text: str, messages: list[str]) -> None:
    rows = Schedule.from_csv(text, Placement.linear(text.count("\n") + 1)).rows
    microbatches = 1 + max(action.microbatch for row in rows for entry in row for action in actions_of(entry))
    schedule = Schedule("csv", Placement.linear(len(rows)), min(microbatches, 2), rows)
    assert [str(violation) for violation in verify(schedule)] == messages


def test_every_violation_is_listed() -> None:
    schedule = make_schedule("1f1b", ranks=4, microbatches=8)
    empty = Schedule("empty", schedule.placement, 8, (*schedule.rows[:3], ()))
    assert len(verify(empty)) == 8


@pytest.mark.parametrize(
    ("spoilt", "said"),
    [
        (("2B5", ""), "rank 2: 2B5 is missing: stage 2 runs 2F5 for microbatch 5"),
        (("2B5", "2B5,2B5"), "rank 2, position 12: 2B5 runs again: it is on rank 2 already, at position 11"),
        (("2F5", "2F9"), "rank 2, position 9: 2F9 does not exist; expected stages 0..3 and microbatches 0..5"),
        (("2B5", "2B5,2I5"), "rank 2: 2I5 should not be there: stage 2 runs 2F5, 2B5 and 2I5 for microbatch 5"),
        (("2F0", "2F0,0F0"), "rank 2, position 1: 0F0 is on rank 2; expected it on rank 0, which holds its stage"),
        (("2B5", "2B5,2R0"), "rank 2, position 12: 2R0 is wrong here; expected 2R5, with the microbatch of the last "
                             "weight gradient of its stage"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("crossed", [0, 4, 5])
def test_a_deadlock_is_listed_with_what_else_is_wrong(spoilt: tuple[str, str], said: str, crossed: int) -> None:
    """Before the place that is wrong, and behind it."""
    text = make_schedule("1f1b", ranks=4, microbatches=6).to_csv()
    turned = f"3F{crossed},3B{crossed}", f"3B{crossed},3F{crossed}"
    text = text.replace(*spoilt).replace(*turned)
    violations = verify(Schedule("csv", Placement.linear(4), 6, Schedule.from_csv(text, Placement.linear(4)).rows))
    assert said in map(str, violations)
    [(before, after)] = [each.cycle for each in violations if each.cycle]
    position = text.splitlines()[3].split(",").index(f"3B{crossed}")
    assert {before, after} == {(3, position), (3, position + 1)}


def test_a_violation_without_a_place_says_what_is_wrong() -> None:
    assert str(Violation("something", "something else")) == "something; expected something else"
    assert str(Violation("something", "something else", rank=3)) == "rank 3: something; expected something else"


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("chunk", [0, -1])
def test_a_cap_holds_from_the_simulated_peak_on(name: str, chunk: int) -> None:
    """And one activation of a chunk below it, every rank that has such a peak is refused."""
    schedule = make_schedule(name, ranks=4, microbatches=8)
    peaks = simulate(schedule).peak_activations
    share = schedule.placement.chunks_per_rank
    caps = [max(peak + chunk / share, 0.5 / share) for peak in peaks]
    violations = verify(schedule, memory_cap=caps)
    assert [violation.rank for violation in violations] == ([0, 1, 2, 3] if chunk else [])
    for violation in violations:
        assert violation.rank is not None
        assert violation.position is not None
        alive = Counter(action.kind for entry in schedule.rows[violation.rank][: violation.position]
                        for action in actions_of(entry))  # fmt: skip
        assert (alive[Kind.F] - alive[Kind.B] - alive[Kind.I] + 1) / share == peaks[violation.rank]
        assert f"the least cap that works here is {peaks[violation.rank]:g}" in violation.expected
    assert verify(schedule, memory_cap=max(peaks)) == []


def test_the_first_action_over_the_cap_is_named_and_what_would_do() -> None:
    schedule = make_schedule("1f1b", ranks=4, microbatches=8)
    assert [str(violation) for violation in verify(schedule, memory_cap=3)] == [
        "rank 0, position 3: with 0F3 the rank keeps 4 microbatches of activations; "
        "expected at most 3; the least cap that works here is 4"
    ]
    assert verify(schedule.forward_only(), memory_cap=1) == []
    paired = Schedule.from_csv("0F0,0F1,(0F2;0B0)OVERLAP_F_B,0B1,0B2")
    assert [violation.position for violation in verify(paired, memory_cap=2)] == [2]


def test_what_is_wrong_besides_is_listed_with_what_is_over_the_cap() -> None:
    schedule = Schedule.from_csv("0F0,0F1,0B0,0B1,0B1")
    assert [violation.position for violation in verify(schedule, memory_cap=1)] == [4, 1]


@pytest.mark.parametrize(
    ("cap", "message"),
    [
        ((4, 4, 4), "one number, or one for each of 4 ranks; got 3"),
        (0, "must be positive, got 0 for rank 0: it needs 4 there"),
        ((4, 3, 2, -1), "must be positive, got -1 for rank 3: it needs 1 there"),
        (float("nan"), "must be positive, got nan"),
    ],
)
def test_a_cap_that_cannot_be_is_an_error(cap: float | tuple[float, ...], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        verify(make_schedule("1f1b", ranks=4, microbatches=8), memory_cap=cap)


@pytest.mark.parametrize(
    ("row", "rule"),
    [
        ("0F0,0B0,0C0", "C stands before the backward of its microbatch (B or I)"),
        ("0F0,0I0,0O0,0L0,0W0", "O and L stand, in this order, between the forward of their microbatch and its"),
        ("0F0,0L0,0O0,0B0", "O and L stand, in this order, between the forward"),
    ],
)
def test_the_rule_for_what_saves_memory_is_said(row: str, rule: str) -> None:
    [violation] = verify(Schedule.from_csv(row))
    assert rule in str(violation)


def test_other_deadlocks_say_no_rule_for_what_saves_memory() -> None:
    assert " stand" not in str(verify(Schedule.from_csv("0B0,0F0")))
