"""Both transports keep what the engine asks of one; and the checks notice one that does not."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from pipeflow.core.errors import Failure
from pipeflow.engine.parallel.context import current_context
from pipeflow.engine.parallel.transport.agreement import all_gather, exchange
from pipeflow.engine.parallel.transport.channels import Members
from pipeflow.engine.parallel.transport.distributed import DistributedTransport
from pipeflow.engine.parallel.transport.local import LocalTransport
from pipeflow.engine.parallel.transport.protocol import Channel, LinkError, Start, Tag, Work
from pipeflow.testing import RankError, conformance, run_processes, run_threads


def conform() -> None:
    conformance.conform(current_context().transport)


@pytest.mark.some(1)
@pytest.mark.parametrize("ranks", [2, 4])
def test_threads(ranks: int) -> None:
    run_threads(conform, ranks, timeout=2.0)


@pytest.mark.some(1)
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.slow
def test_gloo(ranks: int) -> None:
    run_processes(conform, ranks, timeout=2.0)


def agree_as_on_gpus() -> None:
    """What stays in CPU memory of ranks that compute on GPUs, where torch's waits have no deadline."""
    transport = current_context().world
    assert isinstance(transport, DistributedTransport)
    transport.device = torch.device("cuda")
    all_gather(transport, [0.0])  # when all have been launched
    transport.report(Failure(transport.rank, "on purpose"))
    transport.reopen()
    conformance.waits_for_who_is_between_calls(transport)
    conformance.tells_its_place(transport)


def test_agreements_of_gpus_go_over_gloo() -> None:
    run_processes(agree_as_on_gpus, 2, timeout=1.0)


def end_the_call_before() -> None:
    """Rank 0 fails in a call that the others have not come to: they still reach each other, until they come to it."""
    transport = current_context().world
    assert isinstance(transport, DistributedTransport)
    transport.enter(100)
    all_gather(transport, [0.0])
    failure = Failure(0, "in the call after", number=101)
    if transport.rank == 0:
        transport.enter(101)
        assert transport.report(failure) == failure
        return
    _wait_until(lambda: 0 in transport.monitor._verdicts)
    time.sleep(0.1)  # in which its thread would break the channels
    number, peer = torch.full((3,), float(transport.rank)), 3 - transport.rank
    exchange(transport, Tag.CONTROL, {peer: number}, {peer: number.clone()}, "ending the call before")
    channels = transport.channels
    transport.enter(101)
    _wait_until(lambda: channels.is_broken)
    assert transport.report(LinkError(0)) == failure


def _wait_until(happened: Callable[[], bool]) -> None:
    until = time.monotonic() + 5
    while not happened() and time.monotonic() < until:
        time.sleep(0.01)
    assert happened()


def test_a_failure_breaks_no_channel_of_a_rank_that_still_ends_the_call_before() -> None:
    run_processes(end_the_call_before, 3, timeout=5.0)


class LikeNccl:
    """Stands for a communicator of NCCL: moves nothing that is in CPU memory, and says so as NCCL does."""

    def allreduce(self, tensors: list[Tensor]) -> Work:
        raise RuntimeError("something is wrong with this rank's own tensor")

    def recv(self, *_: object) -> Work:
        raise ValueError("Tensors must be CUDA and dense")

    def abort(self) -> None: ...


def read_errors_as_on_gpus() -> None:
    """What a collective of NCCL raises is this rank's own mistake as long as its peer's end is open."""
    transport = current_context().world
    assert isinstance(transport, DistributedTransport)
    everyone = tuple(range(transport.size))
    transport.channels.device, transport.channels.deadline = torch.device("cuda"), ()
    transport.channels._collective[Members(everyone)] = LikeNccl()
    group = transport.group(everyone)
    with pytest.raises(RuntimeError, match="this rank's own tensor"):
        group.all_reduce(torch.zeros(1))
    all_gather(transport, [0.0])
    if transport.rank == 1:
        transport.channels.break_all()  # as a process that ends does
        time.sleep(1)
    else:
        time.sleep(0.5)
        with pytest.raises(LinkError, match=r"in a collective of ranks \[0, 1\] \(rank 1\)"):
            group.all_reduce(torch.zeros(1))


def test_errors_of_collectives_on_gpus_are_read_over_gloo() -> None:
    run_processes(read_errors_as_on_gpus, 2, timeout=5.0)


class OneTag(LocalTransport):
    def sender(self, peer: int, tag: Tag) -> Start:
        return super().sender(peer, max(tag, Tag.HEADER))

    def receiver(self, peer: int, tag: Tag) -> Start:
        return super().receiver(peer, Tag.ACTIVATION if tag > Tag.CONTROL else tag)


class Unconnected(LocalTransport):
    """Uses channels that are not connected."""

    def sender(self, peer: int, tag: Tag) -> Start:
        self.connect([Channel(self.rank, peer, tag)])
        return super().sender(peer, tag)


class Crossed(LocalTransport):
    """Tags but one are swapped on one end."""

    def receiver(self, peer: int, tag: Tag) -> Start:
        swap = {Tag.TIED: Tag.GRADIENT, Tag.GRADIENT: Tag.TIED}
        return super().receiver(peer, swap.get(tag, tag))


class Unordered(LocalTransport):
    """The latest send is received first."""

    def _start(self, key: tuple[int, int, int, Tag], sending: bool, tensors: list[Tensor]) -> Work:  # type: ignore[override]
        if key[3] is not Tag.CONTROL and not sending:
            self.hub.channels[key][0].rotate(1)
        return super()._start(key, sending, tensors)


class Rendezvous(LocalTransport):
    """A send waits for its receive."""

    def sender(self, peer: int, tag: Tag) -> Start:
        start = super().sender(peer, tag)

        def send(tensors: list[Tensor]) -> Work:
            work = start(tensors)
            if tag is Tag.ACTIVATION:
                work.wait()
            return work

        return send


class Stale(LocalTransport):
    """Channels are never made afresh."""

    def report(self, failure: Failure | LinkError) -> Failure:
        assert isinstance(failure, Failure)
        with self.hub.changed:
            first = self.hub.failures.setdefault(self.generation, failure)
            self.hub.changed.notify_all()
        return first

    def reopen(self) -> None:
        self.hub.failures.clear()


class Deaf(LocalTransport):
    """Tells a rank its own failure."""

    def report(self, failure: Failure | LinkError) -> Failure:
        assert isinstance(failure, Failure)
        super().report(failure)
        return failure


@pytest.mark.parametrize(
    ("transport", "check"),
    [
        (Unconnected, conformance.connects),
        (Crossed, conformance.keeps_order),
        (Unordered, conformance.keeps_order),
        (OneTag, conformance.keeps_tags_apart),
        (Rendezvous, conformance.sends_without_waiting),
        (Stale, conformance.starts_afresh),
        (Deaf, conformance.tells_the_first_failure),
    ],
)
def test_a_broken_promise_is_noticed(transport: type[LocalTransport], check: Callable[[LocalTransport], None]) -> None:
    def call() -> None:
        ours = current_context().transport
        assert isinstance(ours, LocalTransport)
        ours.__class__ = transport
        check(ours)

    with pytest.raises(RankError):
        run_threads(call, 2, timeout=0.3)
