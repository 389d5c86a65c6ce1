"""The engine's requirements on a transport, as checks. All ranks call a check together, each with its own transport; it
raises AssertionError if the transport breaks a requirement. Give the transport a timeout of a few seconds.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

import torch
from torch import Tensor

from pipeflow.core.errors import Failure, UsageError
from pipeflow.engine.parallel.transport.agreement import all_gather, start
from pipeflow.engine.parallel.transport.protocol import Channel, LinkError, Tag, Transport, Work

_SOON = 1.0  # seconds
_MANY = 8  # transfers
_TAGS = tuple(tag for tag in Tag if tag is not Tag.CONTROL)  # CONTROL is for the meetings within a check


def conform(transport: Transport) -> None:
    """Runs all checks, one after another. Needs at least two ranks."""
    for check in CHECKS:
        check(transport)


def tells_its_place(transport: Transport) -> None:
    """Each rank from 0 to size - 1 exists once and has a timeout; reopening open channels changes nothing."""
    transport.reopen()
    assert transport.timeout > 0, f"timeout {transport.timeout}"
    assert [int(rank) for [rank] in all_gather(transport, [transport.rank])] == list(range(transport.size))


def connects(transport: Transport) -> None:
    """A channel is refused before it is connected, unless its tensors are in CPU memory. Ranks may give their channels
    to `connect` in any order, also some that are connected already.

    Give this check a transport of which no channel is connected.
    """
    channels = [Channel(*ends, tag) for ends in _ends(transport) for tag in _TAGS]
    for channel in channels:
        sends = channel.source == transport.rank
        make = transport.sender if sends else transport.receiver
        try:
            make(channel.destination if sends else channel.source, channel.tag)
        except UsageError:
            assert not channel.tag.on_host, f"{channel} needs no connection"
        else:
            assert channel.tag.on_host, f"{channel} was used before it was connected"
    transport.connect(channels if transport.rank % 2 else reversed(channels))
    transport.connect(channels)
    _exchange(transport, _TAGS)


def keeps_order(transport: Transport) -> None:
    """Transfers with one tag between an ordered pair of ranks arrive in order."""
    _connect(transport)
    for tag in Tag:
        sent = [
            _send(transport, peer, tag, _number(transport, tag, step))
            for step in range(_MANY)
            for peer in _peers(transport)
        ]
        for step in range(_MANY):
            for peer in _peers(transport):
                _expect(transport, peer, tag, _number(transport, tag, step))
        _finish(sent)


def keeps_tags_apart(transport: Transport) -> None:
    """Tags do not wait for each other, unless they share a communicator: a tensor sent first may be received last."""
    _connect(transport)
    _exchange(transport, Tag, expected=sorted(Tag, key=lambda tag: -Channel(0, 1, tag).communicator.tag))


def receives_ahead(transport: Transport) -> None:
    """Many receives may be posted before anything is sent. They are filled in order, and one wait covers all tags."""
    _connect(transport)
    ends = [(tag, _number(transport, tag, step)) for tag in _TAGS for step in range(_MANY)]
    arriving = {peer: [torch.full_like(tensor, -1) for _, tensor in ends] for peer in _peers(transport)}
    received = {
        peer: [transport.receiver(peer, tag)([tensor]) for (tag, _), tensor in zip(ends, tensors, strict=True)]
        for peer, tensors in arriving.items()
    }
    all_gather(transport, [0.0])
    sent = [_send(transport, peer, tag, tensor) for peer in _peers(transport) for tag, tensor in ends]
    for peer, works in received.items():
        transport.link(peer).wait(reversed(works))
        for (tag, tensor), arrived in zip(ends, arriving[peer], strict=True):
            _require_equal(arrived, tensor, f"{tag.name} from rank {peer}")
    _finish(sent)


def sends_without_waiting(transport: Transport) -> None:
    """A send returns at once even if its receive is not posted yet, no matter how many bytes are in transfer."""
    _connect(transport)
    tensors = [_number(transport, Tag.ACTIVATION, step).expand(1 << 18).contiguous() for step in range(16)]
    sent = []
    if transport.rank == 0:
        started = time.monotonic()
        sent = [_send(transport, 1, Tag.ACTIVATION, tensor) for tensor in tensors]
        assert time.monotonic() - started < _SOON, "sending waited for the receiver"
    all_gather(transport, [0.0])
    if transport.rank == 1:
        for tensor in tensors:
            _expect(transport, 0, Tag.ACTIVATION, tensor)
    _finish(sent)


def moves_any_tensor(transport: Transport) -> None:
    """Tensors of every dtype and shape arrive unchanged, including empty ones."""
    _connect(transport)
    shapes = ((), (1,), (0,), (3, 0, 2), (2, 3, 4))
    dtypes = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8)
    tensors = [torch.ones(shape, dtype=dtype) for shape in shapes for dtype in (*dtypes, torch.bool)]
    tensors = [tensor.to(transport.device) for tensor in tensors]
    for peer in _peers(transport):
        sent = [_send(transport, peer, Tag.ACTIVATION, tensor) for tensor in tensors]
        for tensor in tensors:
            _expect(transport, peer, Tag.ACTIVATION, tensor)
        _finish(sent)


def gives_up(transport: Transport) -> None:
    """A wait for a live rank that makes the same call ends after the timeout, with an error that names that rank."""
    all_gather(transport, [0.0])
    transport.place.patience = transport.timeout
    started = time.monotonic()
    if transport.rank == 1:
        time.sleep(transport.timeout + _SOON)
        first = transport.report(Failure(1, "late"))
    else:
        error = _broken(transport, 1)
        waited = time.monotonic() - started
        assert transport.size > 2 or error.expired, f"{error}"  # of several that wait, another may give up first
        assert 0.5 * transport.timeout <= waited < transport.timeout + _SOON, f"gave up after {waited:.1f} s"
        first = transport.report(error)
    assert (first.rank, first.died) == (1, None), first
    transport.place.patience = None
    transport.reopen()
    all_gather(transport, [0.0])


def waits_for_who_is_between_calls(transport: Transport) -> None:
    """A wait for a live rank that is between two calls lasts until that rank calls, without a timeout."""
    all_gather(transport, [0.0])
    if transport.rank > 0:
        time.sleep(2.2 * transport.timeout)
    all_gather(transport, [0.0])


def tells_own_mistakes_apart(transport: Transport) -> None:
    """An error in a rank's own tensor is not reported as a broken channel; the channels can be reopened."""
    _connect(transport)
    _sent = _meet(transport, reporter=0)
    if transport.rank == 0:
        try:
            _send(transport, 1, Tag.ACTIVATION, torch.ones(2, 2, device=transport.device).t()).wait()
        except LinkError as error:
            raise AssertionError(f"a non-contiguous tensor is reported as a broken channel: {error}") from None
        except Exception as error:
            reason = f"{error}"
        else:
            reason = "it was sent"
        transport.report(Failure(0, reason))
    else:
        try:
            _receive(transport, 0, Tag.ACTIVATION, torch.zeros(2, 2, device=transport.device)).wait()
        except Exception:
            transport.report(Failure(transport.rank, "woke up"))
        else:
            transport.report(Failure(transport.rank, "it was received"))
    transport.reopen()
    all_gather(transport, [0.0])


def tells_the_first_failure(transport: Transport) -> None:
    """A reported failure wakes every waiting rank; all ranks receive the first one reported."""
    last = transport.size - 1
    _sent = _meet(transport, reporter=last)
    started = time.monotonic()
    if transport.rank == last:
        time.sleep(0.2)
    else:
        _broken(transport, transport.rank + 1)
        waited = time.monotonic() - started
        assert waited < 0.2 + min(_SOON, 0.9 * transport.timeout), f"woke up after {waited:.1f} s"
    mine = Failure(transport.rank, f"of rank {transport.rank}", "0F1", 0, 1, trace="a\ntrace")
    first = transport.report(mine)
    assert first == Failure(last, f"of rank {last}", "0F1", 0, 1, trace="a\ntrace"), first
    transport.reopen()
    all_gather(transport, [0.0])


def tells_latecomers(transport: Transport) -> None:
    """A rank that was busy during a failure learns of it in its next wait, even if others have reopened channels."""
    _sent = _meet(transport, reporter=0)
    if transport.rank > 0:
        time.sleep(0.2)
        transport.reopen()
        _broken(transport, 0)
    first = transport.report(Failure(transport.rank, "on purpose"))
    assert first.rank == 0, first
    transport.reopen()
    all_gather(transport, [0.0])


def starts_afresh(transport: Transport) -> None:
    """After a failure, reopened channels contain nothing from before."""
    _connect(transport)
    under_way = [_send(transport, peer, tag, _number(transport, tag, 1)) for tag in _TAGS for peer in _peers(transport)]
    under_way += [
        _receive(transport, peer, tag, _number(transport, tag, 2))
        for tag in (Tag.HEADER, Tag.GRADIENT)
        for peer in _peers(transport)
    ]
    all_gather(transport, [0.0])
    time.sleep(0.2)  # until all have left the meeting
    under_way.clear()
    transport.report(Failure(transport.rank, "on purpose"))
    transport.reopen()
    _connect(transport)
    for tag in Tag:
        _exchange(transport, [tag], 3)


CHECKS = (
    tells_its_place,
    connects,
    keeps_order,
    keeps_tags_apart,
    receives_ahead,
    sends_without_waiting,
    moves_any_tensor,
    gives_up,
    waits_for_who_is_between_calls,
    tells_own_mistakes_apart,
    tells_the_first_failure,
    tells_latecomers,
    starts_afresh,
)


def _meet(transport: Transport, reporter: int) -> list[Work]:
    """All ranks meet; `reporter` continues when all others have left. Keep the returned Works alive until then."""
    all_gather(transport, [0.0])
    if transport.rank != reporter:
        return [_send(transport, reporter, Tag.CONTROL, _number(transport, Tag.CONTROL, 0))]
    for peer in _peers(transport):
        _expect(transport, peer, Tag.CONTROL, _number(transport, Tag.CONTROL, 0))
    return []


def _connect(transport: Transport) -> None:
    """Connects all channels of this rank."""
    transport.connect(Channel(*ends, tag) for ends in _ends(transport) for tag in Tag)


def _ends(transport: Transport) -> list[tuple[int, int]]:
    """The sources and destinations of this rank's channels."""
    return [ends for peer in _peers(transport) for ends in ((transport.rank, peer), (peer, transport.rank))]


def _peers(transport: Transport) -> list[int]:
    return [peer for peer in range(transport.size) if peer != transport.rank]


def _number(transport: Transport, tag: Tag, number: int) -> Tensor:
    """A tensor with a number that identifies a transfer, on the device that its tag uses."""
    return torch.tensor([float(number)], device="cpu" if tag.on_host else transport.device)


def _send(transport: Transport, peer: int, tag: Tag, tensor: Tensor) -> Work:
    return start(transport, peer, tag, tensor, sending=True)


def _receive(transport: Transport, peer: int, tag: Tag, tensor: Tensor) -> Work:
    return start(transport, peer, tag, tensor, sending=False)


def _finish(works: Iterable[Work]) -> None:
    for work in works:
        work.wait()


def _expect(transport: Transport, peer: int, tag: Tag, expected: Tensor) -> None:
    """Receives a tensor and compares it with `expected`."""
    arrived = torch.empty_like(expected)
    _receive(transport, peer, tag, arrived).wait()
    _require_equal(arrived, expected, f"{tag.name} from rank {peer}")


def _exchange(
    transport: Transport, tags: Iterable[Tag], number: int = 0, expected: Iterable[Tag] | None = None
) -> None:
    """Sends every peer a number with each of the tags, and receives theirs, in the order `expected` if there is one."""
    sent = [
        _send(transport, peer, tag, _number(transport, tag, number + tag)) for tag in tags for peer in _peers(transport)
    ]
    for tag in tags if expected is None else expected:
        for peer in _peers(transport):
            _expect(transport, peer, tag, _number(transport, tag, number + tag))
    _finish(sent)


def _require_equal(arrived: Tensor, expected: Tensor, what: str) -> None:
    assert torch.equal(arrived, expected), f"{what} brought {arrived}, expected {expected}"


def _broken(transport: Transport, peer: int) -> LinkError:
    """The error of a receive for which nothing is sent."""
    try:
        _receive(transport, peer, Tag.CONTROL, torch.empty(1)).wait()
    except LinkError as error:
        return error
    raise AssertionError(f"something was received although rank {peer} sent nothing")
