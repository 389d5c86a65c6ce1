"""Transfers that break when they are half done, and groups that are half made: whoever waits is told at once."""

from __future__ import annotations

import os
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pipeflow import PipelineError, launch
from pipeflow.core.errors import Failure
from pipeflow.engine.parallel.context import current_context
from pipeflow.engine.parallel.control.monitor import MonitorStore
from pipeflow.engine.parallel.transport.channels import abort
from pipeflow.engine.parallel.transport.protocol import Channel, Exchange, LinkError, Tag
from pipeflow.testing import run_processes
from pipeflow.testing.ranks import free_port

pytestmark = pytest.mark.slow
LARGE = 1 << 27  # bytes: more than sockets hold
SOON = 5.0  # seconds


class Notes:
    """What ranks tell each other by files: one that is stopped, or about to die, has no other way."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)

    def write(self, name: str) -> None:
        partial = self._folder / f"{name}.part"
        partial.write_text(str(os.getpid()), encoding="utf-8")
        partial.rename(self._folder / name)

    def read(self, name: str) -> int:
        """The process that wrote it, once it has."""
        while not (self._folder / name).exists():
            time.sleep(0.01)
        return int((self._folder / name).read_text(encoding="utf-8"))


def is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] == "T"


def stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    while not is_stopped(pid):
        time.sleep(0.01)


def break_half_way(folder: str, waits: str, dies: bool) -> tuple[str, bool]:
    """Rank 1 sends to rank 2, or receives from it, and waits; rank 2 is stopped in the middle. Then rank 2 is killed,
    or rank 0 tells of a failure.
    """
    transport, notes = current_context().world, Notes(folder)
    if transport.rank == 0:
        receiver = notes.read("posted")
        stop(receiver)
        notes.write("stopped")
        other, sender = receiver, notes.read("sent")
        time.sleep(0.5)  # until the sockets are full
        if waits == "receiver":
            other = sender
            stop(sender)
            os.kill(receiver, signal.SIGCONT)
            time.sleep(0.5)  # until they are empty
        if dies:
            os.kill(other, signal.SIGKILL)
        told = transport.report(LinkError(2) if dies else Failure(0, "an error of rank 0"))
        if not dies:
            os.kill(other, signal.SIGCONT)
        return f"{told.died} {told.reason}", True
    tensor, peer = torch.ones(LARGE, dtype=torch.uint8), 3 - transport.rank
    sender = 2 if waits == "receiver" else 1
    transport.connect([Channel(sender, 3 - sender, Tag.ACTIVATION)])
    started = time.monotonic()
    if (transport.rank == 1) == (waits == "receiver"):
        work = Exchange(transport.link(peer), transport.receiver(peer, Tag.ACTIVATION), [tensor])
        notes.write("posted")
        notes.read("stopped")
    else:
        notes.read("stopped")
        work = Exchange(transport.link(peer), transport.sender(peer, Tag.ACTIVATION), [tensor])
        notes.write("sent")
    with pytest.raises(LinkError) as caught:
        work.wait()
    told = transport.report(caught.value)
    return f"{told.died} {told.reason}", transport.rank == 2 or time.monotonic() - started < SOON


@pytest.mark.exhaustive
@pytest.mark.parametrize("dies", [True, False])
@pytest.mark.parametrize("waits", ["sender", "receiver"])
def test_a_wait_for_half_a_transfer_ends(waits: str, dies: bool, tmp_path: Path) -> None:
    told = run_processes(break_half_way, 3, str(tmp_path), waits, dies, may_die=[2] if dies else [])
    expected = "2 its process is gone" if dies else "None an error of rank 0"
    for each in told[:2] if dies else told:
        assert expected in each[0]
        assert each[1]


def die_half_made(victim: int, group: str) -> tuple[int, int | None, bool]:
    """`victim` dies as soon as the others can find it in a group that all make."""
    current_context().close()
    set_value = MonitorStore.set

    def set_and_die(store: MonitorStore, key: str, value: bytes) -> None:
        set_value(store, key, value)
        if store._prefix.startswith(group):
            time.sleep(0.2)  # until it is sent
            os.kill(os.getpid(), signal.SIGKILL)

    if int(os.environ["RANK"]) == victim:
        pytest.MonkeyPatch().setattr(MonitorStore, "set", set_and_die)
    started = time.monotonic()
    try:
        context = launch(timeout=30.0, tensor=3)
        with context.alarm.raised_everywhere():
            context.tensor.all_reduce(torch.ones(1)).wait()
    except PipelineError as error:
        return error.rank, error.died, time.monotonic() - started < SOON
    raise AssertionError("nobody was told")


@pytest.mark.some(2)
@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("group", ["gloo-down", "group-0-1-2"])
def test_who_dies_while_a_group_is_made_is_named_at_once(victim: int, group: str) -> None:
    told = run_processes(die_half_made, 3, victim, group, may_die=[victim], tensor=3)
    assert [each for rank, each in enumerate(told) if rank != victim] == [(victim, victim, True)] * 2


def die_between_groups(victim: int, port: int) -> int:
    """`victim` dies when torch's group is made, and nobody has been told where the coordinator is."""
    current_context().close()
    dist.destroy_process_group()
    os.environ["MASTER_PORT"] = str(port)
    if int(os.environ["RANK"]) == victim:
        die = "pipeflow.engine.parallel.launcher._gathered"
        pytest.MonkeyPatch().setattr(die, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    with pytest.raises(PipelineError) as caught:
        launch(timeout=2.0)
    return caught.value.rank


@pytest.mark.exhaustive
@pytest.mark.parametrize("victim", [0, 2])
def test_who_dies_in_launch_before_there_is_a_coordinator_is_named(victim: int) -> None:
    told = run_processes(die_between_groups, 3, victim, free_port(), may_die=[victim])
    assert [each for rank, each in enumerate(told) if rank != victim] == [victim] * 2


def broadcast_half(folder: str) -> bool:
    """Rank 0 is stopped in the middle of a broadcast, and killed. The others wait for it, drop the group, and end."""
    context, notes = current_context(), Notes(folder)
    if context.rank == 2:
        broadcasts = notes.read("broadcasts")
        time.sleep(0.3)
        stop(broadcasts)
        os.kill(notes.read("receives"), signal.SIGCONT)
        time.sleep(0.3)
        os.kill(broadcasts, signal.SIGKILL)
        with pytest.raises(PipelineError), context.alarm.raised_everywhere():
            context.world.link(0).wait([context.world.receiver(0, Tag.CONTROL)([torch.ones(1)])])
        return True
    group = context.world.group([0, 1])
    group.all_reduce(torch.ones(1)).wait()

    def broadcast() -> None:
        work = group.broadcast(torch.ones(LARGE, dtype=torch.uint8), 0)
        if context.rank == 0:
            notes.read("receives")
            notes.write("broadcasts")
        else:
            notes.write("receives")
            os.kill(os.getpid(), signal.SIGSTOP)
        work.wait()

    with pytest.raises(PipelineError) as caught, context.alarm.raised_everywhere():
        broadcast()
    return caught.value.died == 0


@pytest.mark.exhaustive
def test_a_wait_for_half_a_collective_ends(tmp_path: Path) -> None:
    assert run_processes(broadcast_half, 3, str(tmp_path), may_die=[0])[1:] == [True, True]


def test_abort_ends_a_wait_of_gloo_s_alone() -> None:
    """Where this fails torch's classes have changed, and waits for half a transfer last for ever."""
    options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # not in torch's stubs
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    store, groups = dist.HashStore(), dict[int, Any]()

    def make(rank: int) -> None:
        groups[rank] = dist.ProcessGroupGloo(store, rank, 2, options)

    threads = [threading.Thread(target=make, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for start in (groups[0].send, groups[0].recv):
        work = start([torch.ones(1)], 1, 0)
        timer = threading.Timer(0.1, abort, [work])
        timer.start()
        assert not work.wait(timedelta(days=1))
        timer.join()
    collectives = [groups[rank].allreduce([torch.ones(1)]) for rank in range(2)]
    assert not abort(collectives[0])
    assert all(work.wait() for work in collectives)
