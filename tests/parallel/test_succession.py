"""A coordinator whose rank dies is succeeded by that of the next rank that lives."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from pipeflow.engine.parallel.control.coordinator import Coordinator
from pipeflow.engine.parallel.control.monitor import Monitor
from pipeflow.engine.parallel.transport.protocol import LinkError

SECRET = b"s" * 32
SIZE = 3


class World:
    """Monitors and coordinators of some ranks."""

    def __init__(self) -> None:
        self.coordinators = [Coordinator("127.0.0.1", SIZE, SECRET, 0.5, elastic=True) for _ in range(SIZE)]
        first, *others = [("127.0.0.1", each.port) for each in self.coordinators]
        self.monitors = [
            Monitor(*first, rank=rank, size=SIZE, secret=SECRET, timeout=5.0, others=others) for rank in range(SIZE)
        ]
        self.open(0, *range(SIZE))

    def open(self, generation: int, *ranks: int) -> None:
        with ThreadPoolExecutor(SIZE) as pool:
            list(pool.map(lambda rank: self.monitors[rank].open(generation), ranks))

    def die(self, rank: int) -> None:
        """Closes all connections of a rank, as the kernel does when its process ends."""
        monitor: Any = self.monitors[rank]
        monitor._leaving = True
        coordinator: Any = self.coordinators[rank]

        def vanish() -> None:
            coordinator._server.close()
            for writer in [*coordinator._writers.values()]:
                writer.transport.abort()

        coordinator._loop.call_soon_threadsafe(vanish)
        monitor._socket.shutdown(2)

    def close(self) -> None:
        for monitor in self.monitors:
            monitor.close()
            monitor._socket.close()  # of a rank that has died
        for coordinator in self.coordinators:
            coordinator.close()


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.close()


def wait_until(ready: Callable[[], bool]) -> None:
    until = time.monotonic() + 10
    while not ready():
        assert time.monotonic() < until
        time.sleep(0.01)


def told(monitor: Any, generation: int) -> int | None:
    wait_until(lambda: generation in monitor._verdicts)
    died: int | None = monitor._verdicts[generation].died
    return died


def test_the_next_rank_takes_over_and_the_next_after_it(world: World) -> None:
    world.die(0)
    assert [told(world.monitors[rank], 0) for rank in (1, 2)] == [0, 0]
    world.open(1, 1, 2)
    assert [(each.host, each.living) for each in world.monitors[1:]] == [(1, (1, 2))] * 2
    world.die(1)
    assert told(world.monitors[2], 1) == 1
    world.open(2, 2)
    assert (world.monitors[2].host, world.monitors[2].living) == (2, (2,))


def test_a_death_that_lets_the_others_open_a_generation_does_not_fail_it(world: World) -> None:
    world.die(1)
    assert told(world.monitors[0], 0) == 1
    with ThreadPoolExecutor(1) as pool:
        opening = pool.submit(world.monitors[0].open, 1)
        wait_until(lambda: world.coordinators[0]._arrived[1] == {0})
        world.die(2)
        opening.result(10)
    world.monitors[0].set("1/after", b"")
    world.monitors[0].get("1/after")
    assert world.monitors[0].living == (0,)
    assert 1 not in world.monitors[0]._verdicts


def test_a_generation_is_opened_once_though_ranks_ask_twice(world: World) -> None:
    world.die(0)
    wait_until(lambda: world.monitors[1].host == world.monitors[2].host == 1)
    world.open(1, 1, 2)
    for monitor in world.monitors[1:]:
        monitor._send({"op": "open", "generation": 1})
    world.die(2)
    assert told(world.monitors[1], 1) == 2
    world.open(2, 1)
    assert world.monitors[1].living == (1,)


def test_a_rank_that_waits_to_open_waits_on_at_the_next_coordinator(world: World) -> None:
    world.die(2)
    assert told(world.monitors[1], 0) == 2
    with ThreadPoolExecutor(1) as pool:
        opening = pool.submit(world.monitors[1].open, 1)
        wait_until(lambda: world.coordinators[0]._arrived[1] == {1})
        world.die(0)
        opening.result(10)
    assert world.monitors[1].living == (1,)
    assert 1 not in world.monitors[1]._verdicts


def test_who_opened_a_generation_that_others_missed_opens_the_next_with_them(world: World) -> None:
    """The coordinator died while it told the ranks that the generation is open: rank 1 has heard it, rank 2 has not."""
    world.monitors[1]._handle({"op": "opened", "generation": 1, "living": [0, 1, 2]})
    world.monitors[1].generation = 1
    with ThreadPoolExecutor(1) as pool:
        opening = pool.submit(world.monitors[2].open, 1)
        wait_until(lambda: world.coordinators[0]._arrived[1] == {2})
        world.die(0)
        with pytest.raises(LinkError):
            opening.result(10)
    assert told(world.monitors[1], 1) == told(world.monitors[2], 1) == 0
    world.open(2, 1, 2)
    assert world.monitors[2].living == (1, 2)


def test_who_does_not_come_in_time_is_dead_and_is_refused_later(world: World) -> None:
    world.monitors[2]._leaving = True  # its process is stopped
    world.die(0)
    wait_until(lambda: world.monitors[1].host == 1)
    world.open(1, 1)
    assert world.monitors[1].living == (1,)
    with pytest.raises(OSError, match="hung up"):
        Monitor("127.0.0.1", world.coordinators[1].port, rank=2, size=SIZE, secret=SECRET, timeout=5.0)
