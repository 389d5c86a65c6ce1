"""The rules of the replay, one by one, on programs of a few lines."""

from __future__ import annotations

import pytest

from tests.nccl.replay import (
    Communicator,
    Compute,
    Connect,
    DeadlockError,
    Exchange,
    Issued,
    Start,
    Synchronize,
    Wait,
    circle_of_connections,
    per_pair,
    replay,
)

DOWN, UP, OTHER = Communicator((0, 1), "DOWN"), Communicator((1, 0), "UP"), Communicator((0, 1), "OTHER")
ALL = [Connect(DOWN), Connect(OTHER), Connect(UP)]


def start(channel: Communicator, number: int = 0, *, on_host: bool = False) -> Start:
    return Start(Exchange(channel, number), on_host)


def wait(channel: Communicator, number: int = 0, *, on_host: bool = False) -> Wait:
    return Wait(Exchange(channel, number), on_host)


def stuck(*logs: list[Issued], queues: int | None = None) -> str:
    """What the deadlock of these logs says."""
    with pytest.raises(DeadlockError) as caught:
        replay(logs, queues=queues)
    return str(caught.value)


def test_an_exchange_ends_when_both_have_started_it() -> None:
    replay([[Compute(), start(DOWN), wait(DOWN)], [start(DOWN), wait(DOWN), Compute()]])
    assert "rank 1's host has issued everything" in stuck([*ALL, start(DOWN), wait(DOWN)], [*ALL])


def test_hosts_meet_at_the_first_use() -> None:
    crossed: tuple[list[Issued], list[Issued]] = [start(DOWN), start(UP)], [start(UP), start(DOWN)]
    told = stuck(*crossed)
    assert "rank 0's host is at the first use of 0->1 DOWN" in told
    assert "rank 1's host is at the first use of 1->0 UP" in told
    replay([[*ALL, *log] for log in crossed])
    assert "rank 0's host connects 0->1 DOWN" in stuck([Connect(DOWN), Connect(UP)], [Connect(UP), Connect(DOWN)])


def test_a_communicator_is_a_stream() -> None:
    """What two operations on one communicator move makes no difference."""
    logs: list[list[Issued]] = [[start(DOWN), start(UP)], [start(UP), start(DOWN)]]
    with pytest.raises(DeadlockError) as caught:
        replay([[Connect(DOWN), *log] for log in logs], shared=per_pair)
    circle = [
        "rank 0's end of 0->1 DOWN #0",
        "rank 1's end of 0->1 DOWN #0",
        "rank 1's end of 1->0 UP #0",
        "rank 0's end of 1->0 UP #0",
    ]
    assert caught.value.circle in [[*circle[turn:], *circle[:turn]] for turn in range(4)]


def test_operations_come_after_the_waits_before_them() -> None:
    """Also on another communicator: each rank waits for what it receives before it sends."""
    replay([[*ALL, start(UP), start(DOWN), wait(UP)], [*ALL, start(DOWN), start(UP), wait(DOWN)]])
    told = stuck([*ALL, start(UP), wait(UP), start(DOWN)], [*ALL, start(DOWN), wait(DOWN), start(UP)])
    assert "rank 0's computations after 1->0 UP #0" in told
    replay([[*ALL, start(UP), wait(UP), start(DOWN)], [*ALL, start(DOWN), start(UP), wait(DOWN)]])


def test_a_wait_does_not_hold_up_the_host() -> None:
    """It goes on to what the other rank's host waits for."""
    late: list[Issued] = [*ALL, start(UP), wait(UP), start(DOWN, on_host=True)]
    replay([late, [*ALL, start(DOWN, on_host=True), wait(DOWN, on_host=True), start(UP)]])
    after = [*late[:-1], Synchronize("item"), late[-1]]
    told = stuck(after, [*ALL, start(DOWN, on_host=True), wait(DOWN, on_host=True), start(UP)])
    assert "rank 0's host waits for its device: item" in told
    assert "rank 1's host waits for 0->1 DOWN #0" in told


def test_the_host_waits_for_computations_or_for_everything() -> None:
    """Where nobody waits for a receive, only the whole device does."""
    other: list[Issued] = [*ALL, start(DOWN, on_host=True), wait(DOWN, on_host=True), start(UP)]
    for everything, runs in ((False, True), (True, False)):
        log: list[Issued] = [*ALL, start(UP), Synchronize("why", everything), start(DOWN, on_host=True)]
        if runs:
            replay([log, other])
        else:
            stuck(log, other)


def test_few_hardware_queues_hold_up_others() -> None:
    """The second receive cannot start before the first has ended, and holds up the send behind it."""
    ahead: list[Issued] = [*ALL, start(UP, 0), start(UP, 1), start(DOWN)]
    answers: list[Issued] = [*ALL, start(DOWN), wait(DOWN), start(UP, 0), start(UP, 1)]
    replay([ahead, answers])
    replay([ahead, answers], queues=4)
    told = stuck(ahead, answers, queues=1)
    assert "rank 0's end of 1->0 UP #1" in told


def test_a_collective_needs_all_of_its_ranks() -> None:
    group = Communicator((0, 1, 2), "group")
    logs: list[list[Issued]] = [[Connect(group), start(group), wait(group)] for _ in range(3)]
    replay(logs)
    stuck(*logs[:2], [Connect(group)])


def test_orders_of_connections_that_contradict_each_other() -> None:
    assert not circle_of_connections([ALL, ALL[1:], ALL[:2]])
    assert set(circle_of_connections([[Connect(DOWN), Connect(UP)], [Connect(UP), Connect(DOWN)]])) == {DOWN, UP}
