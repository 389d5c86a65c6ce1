"""What the engine issues does not deadlock under NCCL's rules, whichever schedule, layout and calls. Controls: it would
if it did otherwise in any of four ways.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from pipeflow.schedules import SCHEDULES
from tests.nccl.cases import Case, pairwise, whole
from tests.nccl.replay import (
    Communicator,
    Connect,
    DeadlockError,
    Issued,
    Log,
    Start,
    Wait,
    as_engine,
    circle_of_connections,
    connected_in_order_of_use,
    per_pair,
    replay,
    used,
    without_connecting,
)

STREAMS = 32  # that torch has on a device; with more communicators, two share one


def require_sound(logs: Sequence[Log]) -> None:
    """The ranks end; every communicator was connected before; the computations wait for each exchange, and once, since
    a second wait, of a thread that measures, would hold them up where the program does not.
    """
    replay(logs, shared=as_engine)
    assert not circle_of_connections(logs)
    for log in logs:
        connected: set[Communicator] = set()
        for issued in log:
            if isinstance(issued, Connect):
                assert issued.communicator not in connected, issued
                connected.add(issued.communicator)
            elif isinstance(issued, Start) and not issued.on_host:
                assert as_engine(issued.exchange.channel) in connected, issued
        assert len(connected) <= STREAMS
        started = [each.exchange for each in log if isinstance(each, Start)]
        awaited = [each.exchange for each in log if isinstance(each, Wait)]
        assert sorted(started) == sorted(awaited)


@pytest.mark.some(2)
@pytest.mark.slow
@pytest.mark.parametrize("case", pairwise(by_schedule=False), ids=str)
def test_no_program_deadlocks(case: Case) -> None:
    require_sound(case.recorded())


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", pairwise(by_schedule=True), ids=str)
def test_no_program_deadlocks_whichever_the_schedule(case: Case) -> None:
    require_sound(case.recorded())


@pytest.mark.slow
@pytest.mark.drill
@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("name", SCHEDULES)
def test_no_program_of_the_matrix_deadlocks(name: str, ranks: int) -> None:
    for case in whole(name, ranks):
        require_sound(case.recorded())


def test_a_step_with_enough_hardware_queues_does_not_deadlock() -> None:
    """With one, as CUDA_DEVICE_MAX_CONNECTIONS=1 makes it, receives that are posted ahead hold up sends."""
    logs = Case("gpipe", 4).recorded()
    replay(logs, queues=STREAMS, shared=as_engine)
    with pytest.raises(DeadlockError):
        replay(logs, queues=1, shared=as_engine)


CONTROLS = [
    Case("1f1b", 4, links="routes"),
    Case("gpipe", 3, links="tied-three"),
    Case("zb-h1", 4, links="tied-three"),
    Case("dualpipe", 4),
]


@pytest.mark.some(2)
@pytest.mark.parametrize("case", CONTROLS, ids=str)
def test_without_connecting_before_they_would_deadlock(case: Case) -> None:
    logs = case.recorded()
    with pytest.raises(DeadlockError, match="at the first use of"):
        replay([without_connecting(log) for log in logs])


@pytest.mark.some(2)
@pytest.mark.parametrize("case", CONTROLS, ids=str)
def test_connected_in_the_order_of_their_programs_they_would_deadlock(case: Case) -> None:
    logs: list[list[Issued]] = [connected_in_order_of_use(log) for log in case.recorded()]
    assert circle_of_connections(logs)
    with pytest.raises(DeadlockError, match="host connects"):
        replay(logs)


@pytest.mark.some(2)
@pytest.mark.parametrize("case", CONTROLS, ids=str)
def test_with_one_communicator_per_pair_of_ranks_they_would_deadlock(case: Case) -> None:
    """For both directions and all tags. All are connected first."""
    logs = case.recorded()
    shared = [[*map(Connect, sorted(set(map(per_pair, used(log))))), *without_connecting(log)] for log in logs]
    with pytest.raises(DeadlockError, match="'s end of"):
        replay(shared, shared=per_pair)


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("case", "tag"), [(Case("zb-v", 4), "REDIRECTED"), (Case("dualpipe", 4, "known"), "TIED")], ids=str
)
def test_with_one_communicator_per_direction_they_would_deadlock(case: Case, tag: str) -> None:
    """Activations and gradients have one order at both ends, and other tags have not."""
    logs = case.recorded()

    def shared(channel: Communicator) -> Communicator:
        return channel._replace(name="ACTIVATION") if channel.name == tag else as_engine(channel)

    both = [[*map(Connect, sorted(set(map(shared, used(log))))), *without_connecting(log)] for log in logs]
    with pytest.raises(DeadlockError, match="'s end of"):
        replay(both, shared=shared)


def test_ties_over_three_ranks_would_deadlock_at_their_first_use() -> None:
    """Each posts its receives before its sends. The first values of a tied weight go one way, from the lowest rank."""
    logs = Case("1f1b", 3, links="tied-three").recorded()
    only = [[each for each in log if isinstance(each, Connect) and each.communicator.name != "TIED"] for log in logs]
    unconnected = [[*first, *without_connecting(log)] for first, log in zip(only, logs, strict=True)]
    with pytest.raises(DeadlockError, match=r"at the first use of .* TIED"):
        replay(unconnected, shared=as_engine)


@pytest.mark.slow
def test_a_traced_step_waits_for_reductions_beside_the_computations() -> None:
    """A copy of a stage may be reduced later than this one, after computations that need this rank's."""
    require_sound(Case("dualpipe", 4, "known", calls="mixed").recorded())
