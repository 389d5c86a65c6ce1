"""What all ranks do together costs each of them little, however many they are."""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pipeflow import Pipeline, execute_pipeline, make_schedule
from pipeflow.core.errors import Failure
from pipeflow.engine.parallel.context import current_context
from pipeflow.engine.parallel.control.coordinator import Coordinator
from pipeflow.engine.parallel.control.monitor import Monitor
from pipeflow.engine.parallel.control.rescue import aside
from pipeflow.engine.parallel.control.wire import Message, Unpacker
from pipeflow.engine.parallel.transport.protocol import LinkError
from pipeflow.testing import run_processes

RANKS, MANY, SECRET = 12, 400, b"s" * 32
SOON = 10.0  # seconds


def step() -> tuple[int, set[int]]:
    """A step of 1F1B; the ranks with which this one has connected."""
    context = current_context()
    schedule = make_schedule("1f1b", ranks=context.pipeline_size, microbatches=2)
    model = Pipeline(nn.Linear(2, 2), schedule, criterion=nn.functional.mse_loss)
    execute_pipeline(iter([(torch.ones(2, 2), torch.zeros(2, 2))]), model)
    channels = context.world.channels  # type: ignore[attr-defined]  # of a distributed transport
    return context.rank, {peer for way in channels._gloo for peer in channels._met(way)}


@pytest.mark.slow
def test_ranks_connect_with_those_that_they_talk_to() -> None:
    """With 6 ranks, a rank agrees with those 1, 2 and 4 further, and with those so many before it."""
    for rank, peers in run_processes(step, 6):
        assert peers == {(rank + distance) % 6 for distance in (1, 2, 4, 5)}


def loop_of_torch() -> bool:
    """The transfers of a pipeline written with torch: receives are posted first, a group is for each direction."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    down, up = dist.new_group(), dist.new_group()
    works = [dist.irecv(torch.zeros(1), rank - 1, down)] if rank > 0 else []
    works += (
        [dist.irecv(torch.zeros(1), rank + 1, up), dist.isend(torch.ones(1), rank + 1, down)] if rank < last else []
    )
    works += [dist.isend(torch.ones(1), rank - 1, up)] if rank > 0 else []
    for work in works:
        assert work is not None
        work.wait()
    return True


@pytest.mark.slow
def test_torchs_own_transfers_start_without_their_peer() -> None:
    """If torch's groups connected two ranks when both use their connection, ranks would wait in a circle here."""
    assert all(run_processes(loop_of_torch, 8, deadline=30.0))


class Counting(Coordinator):
    """Counts the messages of each kind that it sends."""

    def __init__(self, *arguments: Any) -> None:
        self.sent: Counter[str] = Counter()
        super().__init__(*arguments)

    def _send(self, rank: int, message: Message) -> None:
        self.sent[message["op"]] += 1
        super()._send(rank, message)


@pytest.fixture
def world() -> Iterator[tuple[Counting, list[Monitor]]]:
    coordinator = Counting("127.0.0.1", RANKS, SECRET, 2.0)
    where = ("127.0.0.1", coordinator.port)
    monitors = [Monitor(*where, rank=rank, size=RANKS, secret=SECRET, timeout=SOON) for rank in range(RANKS)]
    yield coordinator, monitors
    for monitor in monitors:
        monitor.close()
    coordinator.close()


def test_many_ranks_may_connect_at_the_same_time() -> None:
    """None of them proves that it is a rank before the last one has come."""
    coordinator = Coordinator("127.0.0.1", MANY, SECRET, 2.0)
    sockets = [socket.socket() for _ in range(MANY)]
    for each in sockets:
        each.setblocking(False)
        each.connect_ex(("127.0.0.1", coordinator.port))
    for each in sockets:
        each.settimeout(SOON)
        [challenge] = Unpacker().feed(each.recv(1 << 10))
        assert challenge.keys() == {"challenge"}
        each.close()
    coordinator.close()


def test_a_failure_that_all_ranks_report_is_told_to_each_rank_twice_at_most(
    world: tuple[Counting, list[Monitor]],
) -> None:
    """To all at once, and to each that has reported another."""
    coordinator, monitors = world
    reports = [aside(partial(each.report, 0, Failure(rank, "wrong")), "report") for rank, each in enumerate(monitors)]
    assert len({report.result(SOON).rank for report in reports}) == 1
    assert RANKS <= coordinator.sent["told"] < 2 * RANKS


def test_ranks_that_ask_at_the_same_time_share_the_answers(
    world: tuple[Counting, list[Monitor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeflow.engine.parallel.control.coordinator._TOGETHER", 0.05)
    coordinator, monitors = world
    reports = [aside(partial(each.report, 0, LinkError(0)), "report") for each in monitors]
    assert all("broke, though both live" in report.result(SOON).reason for report in reports)
    assert coordinator.sent["ask"] == RANKS
