"""Ranks that stop, do not come, or make mistakes of their own, and strangers: each is told for what it is."""

from __future__ import annotations

import json
import os
import pickle
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from pipeflow import Pipeline, PipelineError, UsageError, execute_pipeline, launch, make_schedule
from pipeflow.core.errors import Failure
from pipeflow.engine.parallel.context import current_context
from pipeflow.engine.parallel.control import coordinator, wire
from pipeflow.engine.parallel.control.coordinator import Coordinator
from pipeflow.engine.parallel.control.diagnosis import (
    Status,
    diagnose,
    is_left_alone,
    mismatch,
    silent,
    standstill,
)
from pipeflow.engine.parallel.control.monitor import Monitor
from pipeflow.engine.parallel.control.rescue import aside
from pipeflow.engine.parallel.transport import distributed
from pipeflow.engine.parallel.transport.agreement import all_gather
from pipeflow.engine.parallel.transport.protocol import LinkError
from pipeflow.testing import run_processes, run_threads

Run = Callable[..., list[Any]]
RUNS = pytest.mark.parametrize("run", [run_threads, run_processes])
TIMEOUT, SOON = 3.0, 10.0  # seconds


def test_the_end_of_the_chain_is_blamed() -> None:
    def waits(*ranks: int) -> Status:
        return Status(ranks, 5.0)

    computes, elsewhere = Status((), 5.0), Status()
    assert diagnose(0, 5.0, {0: waits(1), 1: waits(2), 2: silent(2), 3: waits(0)}) == silent(2)
    assert diagnose(0, 5.0, {0: waits(1), 1: waits(2), 2: computes}) == Failure(2, "it took too long")
    assert diagnose(0, 4.0, {0: waits(1), 1: waits(2), 2: computes}) is None
    has_just_come = Status((), 5.0, inside=0.1)
    assert diagnose(0, 9.0, {0: waits(1), 1: waits(2), 2: has_just_come}) is None
    assert diagnose(0, 500.0, {0: waits(1), 1: elsewhere}) is None
    circle = diagnose(0, 5.0, {0: waits(1), 1: waits(0)})
    assert circle is not None
    assert circle.rank == 0
    assert "their calls do not match" in circle.reason
    assert diagnose(0, 4.0, {0: waits(1), 1: waits(0)}) is None
    assert diagnose(0, 9.0, {0: computes, 1: waits(2), 2: waits(1)}) is None  # rank 0 does not wait
    assert diagnose(0, 9.0, {0: computes, 1: silent(1), 2: waits(1)}) == silent(1)


def test_the_end_of_a_chain_without_blame_is_named() -> None:
    waits = Status((2,), 5.0)
    between = standstill(0, {0: waits, 2: Status()})
    assert between is not None
    assert between.rank == 2
    assert "between two calls" in between.reason
    slow = standstill(0, {0: waits, 2: Status((), 50.0, inside=6.0)})
    assert slow is not None
    assert slow.reason == "its call takes long, and may take 50 s"
    assert standstill(0, {0: waits, 2: Status((0,), 5.0)}) is None


def test_a_wait_is_said_again_each_time_it_has_doubled(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now, ranks = 100.0, SimpleNamespace(_named={})
    monkeypatch.setattr(coordinator, "time", SimpleNamespace(monotonic=lambda: now))

    def said(seconds: float, statuses: Mapping[int, Status | Failure]) -> list[str]:
        """What is logged when rank 0 has waited so long."""
        nonlocal now
        now = 100 + seconds
        caplog.clear()
        Coordinator._say(cast(Coordinator, ranks), 0, seconds, statuses)
        return caplog.messages

    one, other = ({0: Status((rank,), 5.0), rank: Status()} for rank in (1, 2))
    why = "it is between two calls; the others wait as long as its process answers"
    assert said(5, one) == [f"rank 0 has waited 5 s for rank 1: {why}"]
    assert said(7, {0: Status((1,), 5.0), 1: Status((0,), 5.0)}) == []  # no rank is at the end
    assert said(9, one) == []
    assert said(9, other) == [f"rank 0 has waited 9 s for rank 2: {why}"]
    assert said(10, one) == [f"rank 0 has waited 10 s for rank 1: {why}"]
    assert said(19, one) == []
    assert len(said(20, one)) == 1


def test_a_silent_rank_outside_the_chain_is_blamed_after_those_in_it() -> None:
    waits, computes = Status((1,), 5.0), Status((), 5.0)
    assert diagnose(0, 1.0, {0: waits, 1: computes, 2: silent(2)}) == silent(2)
    assert diagnose(2, 5.0, {0: silent(0), 1: silent(1), 2: waits}) == silent(1)


def test_all_that_a_rank_waits_for_are_followed() -> None:
    statuses = {0: Status((1, 2), 5.0), 1: Status((0,), 5.0), 2: Status((), 5.0)}
    assert diagnose(0, 5.0, statuses) == Failure(2, "it took too long")


def test_ranks_that_wait_in_different_calls_are_told_so() -> None:
    def waits(rank: int, call: str) -> Status:
        return Status((rank,), 5.0, call)

    blame = diagnose(0, 5.0, {0: waits(1, "trains"), 1: waits(0, "evaluates")})
    assert blame == Failure(1, "it evaluates, but rank 0 trains: all ranks must make the same call", usage=True)
    for calls in (("trains", ""), ("", "trains"), ("trains", "trains")):
        blame = diagnose(0, 5.0, {rank: waits(1 - rank, call) for rank, call in enumerate(calls)})
        assert blame is not None
        assert "their calls do not match" in blame.reason


def test_what_ranks_of_one_call_do_is_compared() -> None:
    def sizes(*batches: tuple[int, int] | None, number: int = 3) -> str:
        """What is said about these batches, of which rank 0 may be in another call."""
        statuses = [Status(call="trains", number=3, batch=batch) for batch in batches]
        found = mismatch(3, dict(enumerate([replace(statuses[0], number=number), *statuses[1:], silent(9)])))
        return "" if found is None else f"rank {found.rank}: {found.reason.split(':')[0]}"

    assert sizes((0, 8), (0, 8), (1, 6), (1, 6), None) == ""  # replicas may read batches of other sizes
    assert sizes((0, 8), (0, 6), number=4) == ""
    assert sizes((0, 6), (0, 8), (0, 8), (1, 8)) == (
        "rank 0: it reads a batch of 6 samples, but rank 1, like rank 2, reads a batch of 8 samples"
    )


class Stage(nn.Linear):
    """Does something before its forward."""

    def __init__(self, happens: Callable[[], None]) -> None:
        super().__init__(2, 2)
        self.happens = happens

    def forward(self, hidden: Tensor) -> Tensor:
        self.happens()
        return super().forward(hidden)


def build(happens: Callable[[], None] = lambda: None) -> Pipeline:
    schedule = make_schedule("1f1b", ranks=current_context().pipeline_size, microbatches=2)
    return Pipeline(Stage(happens), schedule, criterion=nn.functional.mse_loss)


BATCH = (torch.ones(2, 2), torch.zeros(2, 2))


def stop(victim: int, folder: str) -> tuple[int, int | None, float, bool]:
    """`victim` stops itself in a step; when all others have raised, one of them lets it go on, and all step again."""
    context, armed = current_context(), False
    notes, mine = Path(folder), context.rank == victim

    def happens() -> None:
        if armed and mine:
            (notes / "pid").write_text(f"{os.getpid()}", encoding="utf-8")
            (notes / "pid").rename(notes / "stopped")
            os.kill(os.getpid(), signal.SIGSTOP)

    model = build(happens)
    execute_pipeline(iter([BATCH]), model)
    armed, started = True, time.monotonic()
    with pytest.raises(PipelineError) as caught:
        execute_pipeline(iter([BATCH]), model)
    took, armed = time.monotonic() - started, False
    (notes / f"told-{context.rank}").touch()
    while len(list(notes.glob("told-*"))) < context.world_size - 1:
        time.sleep(0.05)
    if not mine and context.rank == min({0, 1} - {victim}):
        os.kill(int((notes / "stopped").read_text(encoding="utf-8")), signal.SIGCONT)
    while len(list(notes.glob("told-*"))) < context.world_size:
        time.sleep(0.05)
    loss = execute_pipeline(iter([BATCH]), model, broadcast_loss=True).loss
    return caught.value.rank, caught.value.died, took, loss is not None


@pytest.mark.some(1)
@pytest.mark.parametrize("victim", [0, 2])
def test_a_stopped_rank_is_named_and_may_go_on(victim: int, tmp_path: Path) -> None:
    for rank, (named, died, took, works) in enumerate(run_processes(stop, 3, victim, str(tmp_path), timeout=TIMEOUT)):
        assert works
        if rank != victim:
            assert (named, died) == (victim, None)
            assert took < SOON


def test_launch_names_who_does_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 waits alone; and rank 1 waits where there is no rank 0."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    for rank, size, absent in ((0, 3, "ranks 1, 2"), (1, 2, "rank 0 failed: it")):
        for name, value in {"RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
            monkeypatch.setenv(name, str(value))
        started = time.monotonic()
        with pytest.raises(PipelineError, match=f"{absent} did not join within 1 s of launch"):
            launch(timeout=1.0)
        assert time.monotonic() - started < SOON


def launch_and_meet() -> None:
    """A rank whose channels are open waits for no other before its first call."""
    context = launch(timeout=30.0)
    with context.alarm.raised_everywhere():
        all_gather(context.world, [0.0])


def die_while_channels_open(victim: int) -> tuple[int, int | None, float]:
    current_context().close()
    if int(os.environ["RANK"]) == victim:
        monkeypatch = pytest.MonkeyPatch()
        monkeypatch.setattr(distributed, "Channels", lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))
    started = time.monotonic()
    with pytest.raises(PipelineError) as caught:
        launch_and_meet()
    return caught.value.rank, caught.value.died, time.monotonic() - started


@pytest.mark.parametrize("victim", [0, 2])
def test_who_dies_while_channels_open_is_named(victim: int) -> None:
    told = run_processes(die_while_channels_open, 3, victim, may_die=[victim])
    assert told.pop(victim) is None
    for named, died, took in told:
        assert (named, died) == (victim, victim)
        assert took < SOON


def step_after_close() -> bool:
    model = build()
    execute_pipeline(iter([BATCH]), model)
    current_context().close()
    for _ in range(2):
        with pytest.raises(UsageError, match=r"this rank has closed its context: call pipeflow\.launch"):
            execute_pipeline(iter([BATCH]), model)
    model.context.close()
    return True


def test_a_step_after_the_context_was_closed_is_an_error() -> None:
    assert run_processes(step_after_close, 2) == [True] * 2


MISTAKES: dict[str, Callable[[], Tensor]] = {
    "a tensor without memory": lambda: torch.ones(2, 2, device="meta"),
    "a jagged tensor": lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged),
}


def make_mistake(what: str) -> tuple[str, int | None, bool]:
    """Rank 0's stage returns what cannot be sent, once."""
    wrong = False

    class Wrong(Stage):
        def forward(self, hidden: Tensor) -> Tensor:
            return MISTAKES[what]() if wrong else super().forward(hidden)

    schedule = make_schedule("1f1b", ranks=2, microbatches=2)
    model = Pipeline(Wrong(lambda: None), schedule, criterion=nn.functional.mse_loss)
    execute_pipeline(iter([BATCH]), model)
    wrong = current_context().rank == 0
    with pytest.raises((PipelineError, UsageError)) as caught:
        execute_pipeline(iter([BATCH]), model)
    wrong, error = False, caught.value
    loss = execute_pipeline(iter([BATCH]), model, broadcast_loss=True).loss
    named = error.rank if isinstance(error, PipelineError) else current_context().rank
    return f"{named}", getattr(error, "died", None), loss is not None


@pytest.mark.some(2)
@RUNS
@pytest.mark.parametrize("what", MISTAKES)
def test_a_tensor_that_cannot_be_sent_is_its_sender_s_mistake(run: Run, what: str) -> None:
    assert run(make_mistake, 2, what) == [("0", None, True)] * 2


def use_odd_modes() -> list[bool]:
    """Evaluates under inference_mode and trains outside it; with a default device that has no memory."""
    works = []
    model = build()
    with torch.inference_mode():
        execute_pipeline(iter([BATCH]), model, forward_only=True)
    for _ in range(3):
        works.append(execute_pipeline(iter([BATCH]), model, broadcast_loss=True).loss is not None)
        works.append(execute_pipeline(iter([BATCH]), model, forward_only=True, broadcast_loss=True).loss is not None)
    torch.set_default_device("meta")
    try:
        losses = [execute_pipeline(iter([BATCH]), model, broadcast_loss=True).loss for _ in range(2)]
        works += [loss is not None for loss in losses]
    finally:
        torch.set_default_device(None)
    return works


@RUNS
def test_modes_of_torch_do_not_reach_what_ranks_tell_each_other(run: Run) -> None:
    assert run(use_odd_modes, 2) == [[True] * 8] * 2


class Harmful:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.abort, ()


def test_a_stranger_learns_nothing_and_ends_nothing() -> None:
    secret, size = b"s" * 32, 2
    coordinator = Coordinator("127.0.0.1", size, secret, 0.5)
    where = ("127.0.0.1", coordinator.port)
    report = {"op": "report", "generation": 0, "failure": {"rank": 1, "reason": "planted"}}
    said = [
        b"",
        os.urandom(2000),
        pickle.dumps(Harmful()),
        (1 << 31).to_bytes(4) + b"x" * 100,
        wire.pack({"rank": 1, "proof": wire.prove(b"guessed", "", 1)}) + wire.pack(report),
        wire.pack(report) + wire.pack({"op": "get", "key": "0/secret"}),
        wire.pack({"rank": {}, "proof": 3}),
        json.dumps([report]).encode(),
    ]
    for each in said:
        with socket.create_connection(where, 5.0) as stranger:
            stranger.sendall(each)
            stranger.shutdown(socket.SHUT_WR)
            heard = b""
            while data := stranger.recv(1 << 16):
                heard += data
            [challenge] = wire.Unpacker().feed(heard)
            assert challenge.keys() == {"challenge"}
    monitors = [Monitor(*where, rank=rank, size=size, secret=secret, timeout=5.0) for rank in range(size)]
    opening = [threading.Thread(target=monitor.open, args=(0,)) for monitor in monitors]
    for thread in opening:
        thread.start()
    for thread in opening:
        thread.join(5.0)
    monitors[0].set("secret", b"\0\xff")
    assert monitors[1].get("secret") == b"\0\xff"
    assert not any(monitor.must_break(0) for monitor in monitors)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(where, 1.0)  # when all have come, nobody else is let in
    assert monitors[0].report(0, Failure(0, "real")).reason == "real"
    for monitor in monitors:
        monitor.close()
    coordinator.close()


def test_a_rank_that_stands_still_between_two_calls_is_named_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    secret, size = b"s" * 32, 2
    coordinator = Coordinator("127.0.0.1", size, secret, 0.5)
    where = ("127.0.0.1", coordinator.port)
    monitors = [Monitor(*where, rank=rank, size=size, secret=secret, timeout=0.4) for rank in range(size)]
    operation: Future[None] = Future()
    waits = threading.Thread(target=monitors[0].result, args=(operation,))
    waits.start()
    until = time.monotonic() + 10.0
    while not caplog.messages and time.monotonic() < until:
        time.sleep(0.05)
    operation.set_result(None)
    waits.join(5.0)
    assert re.match(r"rank 0 has waited [\d.]+ s for rank 1: it is between two calls", caplog.messages[0])
    for monitor in monitors:
        monitor.close()
    coordinator.close()


def test_a_rank_that_makes_no_call_after_a_failure_is_named() -> None:
    """Before one, it is waited for."""
    coordinator = Coordinator("127.0.0.1", 2, b"s" * 32, 0.5)
    where = ("127.0.0.1", coordinator.port)
    first, second = (Monitor(*where, rank=rank, size=2, secret=b"s" * 32, timeout=0.4) for rank in range(2))
    first.place.patience = 0.4
    with pytest.raises(LinkError) as caught:
        aside(lambda: first.open(1), "opening").result(SOON)
    told = first.report(1, caught.value)
    assert (told.rank, told.died) == (1, None)
    assert re.match(r"it has not made another call within [\d.]+ s after a failure", told.reason)
    for each in (first, second):
        each.close()
    coordinator.close()


@pytest.mark.parametrize("error", [KeyboardInterrupt, UsageError, ArithmeticError])
def test_the_chain_of_an_error_has_an_end(error: type[BaseException]) -> None:
    def happens() -> None:
        raise error

    def chain() -> int:
        with pytest.raises((KeyboardInterrupt, UsageError, PipelineError)) as caught:
            execute_pipeline(iter([BATCH]), build(happens))
        seen: list[BaseException] = []
        upcoming: list[BaseException | None] = [caught.value]
        while upcoming:
            each = upcoming.pop()
            if each is not None:
                assert each not in seen
                seen.append(each)
                upcoming.append(each.__cause__ or each.__context__)
        return len(seen)

    assert run_threads(chain, 1)[0] > 0


def refuse_on(rank: int) -> type[Exception]:
    context = current_context()

    def call() -> None:
        with context.alarm.raised_everywhere():
            if context.pipeline_rank == rank:
                raise UsageError("give another number")
            all_gather(context.world, [0.0])

    with pytest.raises(UsageError, match="give another number") as caught:
        call()
    return caught.type


@RUNS
def test_a_usage_error_of_one_rank_is_one_on_every_rank(run: Run) -> None:
    refused, heard = run(refuse_on, 2, 0)
    assert refused is UsageError
    assert issubclass(heard, PipelineError)


def test_a_wait_in_an_earlier_call_than_the_one_that_failed_ends() -> None:
    """Also if nothing else ends it, as on GPUs."""
    coordinator = Coordinator("127.0.0.1", 2, b"s" * 32, 0.5)
    where = ("127.0.0.1", coordinator.port)
    first, second = (Monitor(*where, rank=rank, size=2, secret=b"s" * 32, timeout=0.4) for rank in range(2))
    for each, number in ((first, 2), (second, 1)):
        each.enter(number)
        each.place.patience = 0.4
    first.report(0, Failure(0, "wrong", number=2))
    first.place.patience = None
    never: Future[None] = Future()
    waiting = aside(lambda: second.result(never), "waiting")
    with pytest.raises(LinkError) as caught:
        waiting.result(SOON)
    assert second.report(0, caught.value).reason == "wrong"
    for each in (first, second):
        each.close()
    coordinator.close()


def test_a_rank_is_left_alone_by_those_in_the_call_that_failed() -> None:
    """And not by one that has yet to come."""
    failed = Failure(0, "wrong", number=5)
    waits = Status((1,), 5.0, number=4)
    for number, alone in ((3, False), (4, False), (5, True), (6, True)):
        assert is_left_alone(0, {0: waits, 1: Status(number=number)}, failed) is alone
    behind = {0: waits, 1: Status((2,), 5.0, number=4), 2: Status(number=5)}
    assert is_left_alone(0, behind, failed)
    assert not is_left_alone(0, behind, Failure(0, "gone", died=0))


def test_a_coordinator_that_ends_says_nothing_of_its_connections(caplog: pytest.LogCaptureFixture) -> None:
    """Of one that has not proved yet to be a rank, as when a rank's cable is cut while it connects."""
    coordinator = Coordinator("127.0.0.1", 2, b"s" * 32, 0.5)
    with socket.create_connection(("127.0.0.1", coordinator.port), 5.0) as connecting:
        assert connecting.recv(1 << 10)
        coordinator.close()
    assert not caplog.messages
