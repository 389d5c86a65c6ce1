"""What the engine asks of a transport, as checks. Each is called on every rank together, with that rank's transport,
and raises AssertionError where a promise is broken. Give the transport a timeout of a few seconds.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

import torch
from torch import Tensor

from pipeflow.core.errors import Failure
from pipeflow.parallel.transport.agreement import all_gather, start
from pipeflow.parallel.transport.protocol import Tag, Transport
from pipeflow.parallel.transport.work import LinkError, Work

_SOON = 1.0  # seconds
_MANY = 8  # transfers
_TAGS = tuple(tag for tag in Tag if tag is not Tag.CONTROL)  # that one is for the meetings within a check


def conform(transport: Transport) -> None:
    """Makes every check in turn. Needs at least two ranks."""
    for check in CHECKS:
        check(transport)


def tells_its_place(transport: Transport) -> None:
    """Every rank from 0 to size is there once; each has a timeout; reopening what is open changes nothing."""
    transport.reopen()
    assert transport.timeout > 0, f"timeout {transport.timeout}"
    assert [int(rank) for [rank] in all_gather(transport, [transport.rank])] == list(range(transport.size))


def keeps_order(transport: Transport) -> None:
    """The transfers with one tag are a FIFO between every ordered pair of ranks."""
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
    """No tag waits for another: what was sent first, with one, may be received last."""
    sent = [_send(transport, peer, tag, _number(transport, tag, tag)) for tag in Tag for peer in _peers(transport)]
    for tag in reversed(Tag):
        for peer in _peers(transport):
            _expect(transport, peer, tag, _number(transport, tag, tag))
    _finish(sent)


def receives_ahead(transport: Transport) -> None:
    """Receives may be posted before anything is sent, many at once; they are filled in their order, and one wait for
    those of all tags is enough.
    """
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
    """A send returns at once though its receive is not posted yet, however much is on its way."""
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
    """Tensors of every dtype and of any shape arrive as they are, those without an element too."""
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
    """A wait for a rank that makes the same call ends when the timeout is over; it names that rank, which lives."""
    all_gather(transport, [0.0])
    transport.patience = transport.timeout
    started = time.monotonic()
    first = Failure(transport.rank, "late")
    if transport.rank == 0:
        error = _broken(transport, 1)
        waited = time.monotonic() - started
        assert error.expired, f"{error}"
        assert 0.5 * transport.timeout <= waited < transport.timeout + _SOON, f"gave up after {waited:.1f} s"
        first = transport.report(error)
        assert (first.rank, first.died) == (1, None), first
    else:
        time.sleep(transport.timeout + _SOON)
        assert transport.report(first).rank == 1
    transport.patience = None
    transport.reopen()
    all_gather(transport, [0.0])


def waits_for_who_is_between_calls(transport: Transport) -> None:
    """A wait for a rank that lives and makes no call does not end before it comes."""
    all_gather(transport, [0.0])
    if transport.rank > 0:
        time.sleep(2.2 * transport.timeout)
    all_gather(transport, [0.0])


def tells_own_mistakes_apart(transport: Transport) -> None:
    """What is wrong with a rank's own tensor is no failure of a channel; the channels may be opened afresh."""
    _sent = _meet(transport, reporter=0)
    if transport.rank == 0:
        try:
            _send(transport, 1, Tag.ACTIVATION, torch.ones(2, 2, device=transport.device).t()).wait()
        except LinkError as error:
            raise AssertionError(f"a tensor that is not contiguous is told as a broken channel: {error}") from None
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
    """A report wakes whoever waits, for whichever rank; the first one reported is told to all."""
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
    """A rank that was busy when a failure was told hears of it at its next wait, though others may start afresh."""
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
    """After a failure the channels hold nothing that was under way."""
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
    for tag in Tag:
        sent = [_send(transport, peer, tag, _number(transport, tag, 3)) for peer in _peers(transport)]
        for peer in _peers(transport):
            _expect(transport, peer, tag, _number(transport, tag, 3))
        _finish(sent)


CHECKS = (
    tells_its_place,
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
    """All meet; who is to report a failure goes on when all others have left. They hold what is returned until then."""
    all_gather(transport, [0.0])
    if transport.rank != reporter:
        return [_send(transport, reporter, Tag.CONTROL, _number(transport, Tag.CONTROL, 0))]
    for peer in _peers(transport):
        _expect(transport, peer, Tag.CONTROL, _number(transport, Tag.CONTROL, 0))
    return []


def _peers(transport: Transport) -> list[int]:
    return [peer for peer in range(transport.size) if peer != transport.rank]


def _number(transport: Transport, tag: Tag, number: int) -> Tensor:
    """A tensor to tell transfers apart, in the memory of its tag."""
    return torch.tensor([float(number)], device="cpu" if tag.on_host else transport.device)


def _send(transport: Transport, peer: int, tag: Tag, tensor: Tensor) -> Work:
    return start(transport, peer, tag, tensor, sending=True)


def _receive(transport: Transport, peer: int, tag: Tag, tensor: Tensor) -> Work:
    return start(transport, peer, tag, tensor, sending=False)


def _finish(works: Iterable[Work]) -> None:
    for work in works:
        work.wait()


def _expect(transport: Transport, peer: int, tag: Tag, expected: Tensor) -> None:
    """Receives, and compares."""
    arrived = torch.empty_like(expected)
    _receive(transport, peer, tag, arrived).wait()
    _require_equal(arrived, expected, f"{tag.name} from rank {peer}")


def _require_equal(arrived: Tensor, expected: Tensor, what: str) -> None:
    assert torch.equal(arrived, expected), f"{what} brought {arrived}, expected {expected}"


def _broken(transport: Transport, peer: int) -> LinkError:
    """How a receive fails for which nothing is sent."""
    try:
        _receive(transport, peer, Tag.CONTROL, torch.empty(1)).wait()
    except LinkError as error:
        return error
    raise AssertionError(f"rank {peer} sent nothing, and yet something was received")
