"""Monitor: each rank's connection to the coordinator. Its thread answers for the rank while this computes, receives
failures of other ranks at once, and notices when the rank waits too long. A torch store on top of it lets the channels
of a generation find each other; no call of it outlasts a failure.
"""

from __future__ import annotations

import select
import socket
import threading
import time
from base64 import b64decode, b64encode
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from pipeflow.core.errors import Failure
from pipeflow.engine.parallel.control import wire
from pipeflow.engine.parallel.control.diagnosis import AGAIN, RankPlace, gone, in_wait, left, silent
from pipeflow.engine.parallel.control.rescue import LONGEST, Rescue
from pipeflow.engine.parallel.control.wire import Message, forget_in_children
from pipeflow.engine.parallel.transport.protocol import LinkError

T = TypeVar("T")
HOST = 0  # the rank whose process has the coordinator
_TRIES, _PAUSE = 3, 0.05  # to connect to a coordinator that takes over, and seconds between
_ANSWERED = 3  # times the grace: the coordinator may first ask all ranks, which takes up to one


def grace_of(timeout: float) -> float:
    """Seconds within which a live rank must answer, if waits give up after `timeout` seconds."""
    return min(max(timeout / 4, 0.5), 10.0)


class Monitor:
    """Connects to the coordinator at (`address`, `port`) as rank `rank`. If its process dies, connects to the next of
    `others`, the addresses and ports of the coordinators of ranks from 1 on. Raises OSError if the first does not
    answer in time.

    Attributes:
        host: the rank whose process has the coordinator.
        living: the ranks with which the last generation was opened.
        waiting: the ranks for which this rank waits now: one of them has to do something first. Set by the code that
            waits, which increases `waits` first; empty if it does not wait.
        place: where this rank is.
        generation: the one that was opened last.
        expired: True if channels were broken because this rank had waited too long.
        breaks: breaks the channels of a generation. The monitor's thread calls this and the next.
        meets: called when another rank has read the value that this one stored, to meet it: the value of this key, of
            that rank, is here.
        rescue: frees this rank if its call goes on after a failure.
    """

    def __init__(
        self,
        address: str,
        port: int,
        *,
        rank: int,
        size: int,
        secret: bytes,
        timeout: float,
        others: Sequence[tuple[str, int]] = (),
    ) -> None:
        self.host = HOST
        self.waiting: tuple[int, ...] = ()
        self.waits = 0
        self.place = RankPlace()
        self.expired = False
        self.breaks: Callable[[int], None] = lambda _: None
        self.meets: Callable[[str], None] = lambda _: None
        self.rescue = Rescue(rank, min(grace_of(timeout), LONGEST))
        self._rank = rank
        self.living = tuple(range(size))
        self._timeout = timeout
        self.generation = 0
        self._reopens = False  # waits for all others, after a failure
        self._reported = -1  # the last generation that has ended for this rank
        self._opened = -1
        self._verdicts: dict[int, Failure] = {}  # by generation
        self._values: dict[str, str] = {}
        self._changed = threading.Condition()
        self._owed_since: float | None = None  # the coordinator has been asked, and is silent
        self._host: Failure | None = None  # once it is gone
        self._leaving = False
        self._ended = threading.Event()
        self._sending = threading.Lock()
        self._hosts, self._secret = [(address, port), *others], secret
        self._opening: int | None = None  # the generation that this rank waits for
        self._join(HOST)
        forget_in_children(self.sockets)
        self._thread = threading.Thread(target=self._watch, name=f"pipeflow monitor of rank {rank}", daemon=True)
        self._thread.start()

    def _join(self, host: int) -> None:
        """Connects to the coordinator of a rank."""
        self._unpacker = wire.Unpacker()
        connection = socket.create_connection(self._hosts[host], self._timeout)
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            proof = wire.prove(self._secret, self._receive_one(connection)["challenge"], self._rank)
            connection.sendall(wire.pack({"rank": self._rank, "proof": proof}))
            self._receive_one(connection)
        except OSError:
            connection.close()
            raise
        with self._sending:
            self.host, self._socket = host, connection
        self._readable = select.poll()  # unlike select, it works with over a thousand open files
        self._readable.register(self._socket, select.POLLIN)

    def _joins_next(self) -> bool:
        """The coordinator's process is gone: connects to the next one whose process is not. Returns False if there is
        none, or if it does not take this rank.
        """
        died, generation, opening = self.host, self.generation, self._opening  # the rank may begin to open one now
        opened = generation if opening is None else opening - 1
        self._socket.close()
        if opening is None:
            self._tell(generation, gone(died))
        lost = {*range(len(self._hosts))} - {*self.living} | {died}
        for host in range(died + 1, len(self._hosts)):
            if host in lost:
                continue
            for _ in range(_TRIES):
                try:
                    self._join(host)
                except ConnectionRefusedError:  # its process is gone, too
                    lost.add(host)
                    break
                except OSError:  # it may be about to end
                    time.sleep(_PAUSE)
                else:
                    self._send({"op": "succeed", "gone": sorted(lost), "opened": opened})
                    if (again := self._opening) is not None:
                        self._send({"op": "open", "generation": again})
                    return True
            else:
                return False
        return False

    def _receive_one(self, connection: socket.socket) -> Message:
        while data := connection.recv(1 << 16):
            for message in self._unpacker.feed(data):
                return message
        raise ConnectionError("rank 0 has hung up")

    def sockets(self) -> list[int]:
        """The file descriptor of the connection."""
        return [self._socket.fileno()]

    def open(self, generation: int) -> None:
        """Waits until all ranks have opened this generation. Raises LinkError if one cannot."""
        self._opening, self.generation, self.expired = generation, generation, False
        self._send({"op": "open", "generation": generation})
        self._reopens = generation > 0
        try:
            self._wait_until(lambda: self._opened >= generation, asks=True)
        finally:
            self._reopens, self._opening = False, None

    def set(self, key: str, value: bytes) -> None:
        """Stores a value for all ranks, until the next generation."""
        self._send({"op": "set", "key": key, "value": b64encode(value).decode()})

    def get(self, key: str, **meeting: Any) -> bytes:
        """The value of a key, as soon as some rank has set it. May be called on any thread. If rank `peer` has set it,
        and this rank the key `mine`, the two meet. Raises LinkError.
        """
        if key not in self._values:
            self._send({"op": "get", "key": key, **meeting})
            self.waits += 1  # a wait for something that needs this value has made progress
            self._sleep_until(lambda: key in self._values, asks=True)
        return b64decode(self._values[key])

    def result(self, future: Future[T], ranks: tuple[int, ...] = ()) -> T:
        """The result of an operation that this rank does together with `ranks`, by default all, on another thread.

        Raises LinkError if a failure is reported or the wait takes too long.
        """
        future.add_done_callback(self._wake)
        self._wait_until(future.done, ranks)
        return future.result()

    def _wake(self, _: object) -> None:
        with self._changed:
            self._changed.notify_all()

    def enter(self, number: int) -> None:
        """Records that this rank begins call number `number` of those that all ranks make together."""
        self.rescue.over()
        self.place.enter(number)
        self._break_if_needed(self.generation)

    def report(self, generation: int, failure: Failure | LinkError) -> Failure:
        """Reports a failure to all ranks; returns the failure that was reported first."""
        self._reported = generation
        self.rescue.over()
        if self._host is not None:
            pass  # nobody would hear it
        elif isinstance(failure, Failure):
            self._send({"op": "report", "generation": generation, "failure": asdict(failure)}, owed=True)
        else:
            lost = {"peer": failure.peer, "why": failure.why, "waited": failure.story(self._rank, self._timeout)}
            self._send({"op": "lost", "generation": generation, **lost}, owed=True)
        with self._changed:
            self._changed.wait_for(
                lambda: generation in self._verdicts or self._host is not None, _ANSWERED * grace_of(self._timeout)
            )
        if generation not in self._verdicts:  # the coordinator ended before it answered, or hangs
            if isinstance(failure, LinkError):  # if other ranks are gone, too, nobody knows
                failure = in_wait(self._host or silent(self.host), failure.story(self._rank, self._timeout))
            self._tell(generation, failure)
        return self._verdicts[generation]

    def must_break(self, generation: int) -> bool:
        """Returns True if a failure was reported, unless it happened in a call that this rank has not begun."""
        failure = self._verdicts.get(generation)
        return failure is not None and (failure.number is None or failure.number <= self.place.number)

    def close(self) -> None:
        """Reports that this rank leaves, and ends the thread. A later `report` just returns its argument."""
        if not self._leaving:
            self._leaving = True
            self._ended.set()
            self._send({"op": "bye"})
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_WR)
            self._thread.join(2 * grace_of(self._timeout))
            self._socket.close()
            self._end(left(self._rank))

    def _end(self, blame: Failure) -> None:
        """Records why the coordinator answers no more. Whoever waits for an answer goes on without it."""
        with self._changed:
            self._host = self._host or blame
            self._changed.notify_all()

    def _wait_until(self, ready: Callable[[], bool], ranks: tuple[int, ...] = (), *, asks: bool = False) -> None:
        self.waits += 1
        self.waiting = ranks or tuple(other for other in self.living if other != self._rank)
        try:
            self._sleep_until(ready, asks=asks)
        finally:
            self.waiting = ()

    def _sleep_until(self, ready: Callable[[], bool], *, asks: bool) -> None:
        """Waits for `ready`. If it `asks` the coordinator, the wait ends with the coordinator, too."""
        generation = self.generation

        def ends() -> bool:
            return ready() or self.expired or self.must_break(generation) or (asks and self._host is not None)

        with self._changed:
            self._changed.wait_for(ends)
        if not ready():
            other = next((each for each in self.living if each != self._rank), self._rank)
            raise LinkError(other, "opening channels", expired=self.expired)

    def _send(self, message: Message, *, owed: bool = False) -> None:
        if owed and self._owed_since is None:
            self._owed_since = time.monotonic()
        with suppress(OSError), self._sending:  # the thread sees it, too, when the connection is gone
            self._socket.sendall(wire.pack(message))

    def _watch(self) -> None:
        tick = min(max(self._timeout / 8, 0.05), 1.0)
        watched, since, complaints, asked = -1, 0.0, 0, 0
        while self._hears(tick):
            now = time.monotonic()
            if self._owed_since is not None and now - self._owed_since > 2 * grace_of(self._timeout):
                self._owed_since = None
                self._tell(self.generation, silent(self.host))
            is_in_call = self.place.patience is not None
            (self.rescue.look if is_in_call else self.rescue.over)()
            if not (self.waiting or is_in_call) or self.waits != watched:
                watched, since, complaints, asked = self.waits, now, 0, 0
            elif now - since > self._timeout * (1 + AGAIN * complaints):
                complaints += 1
                self._complain(watched, now - since)
            elif self.place.suspects and now - since > tick * asked:
                asked = max(1, 2 * asked)
                self._send({"op": "suspects", "generation": self.generation})

    def _hears(self, seconds: float) -> bool:
        """Handles the messages of the next `seconds`; returns False when the thread must end."""
        if self._host is not None:
            return not self._ended.wait(seconds)
        try:
            if not self._readable.poll(1000 * seconds):
                return True
            data = self._socket.recv(1 << 16)
            self._owed_since = None
            for message in self._unpacker.feed(data):
                self._handle(message)
        except (OSError, ValueError):
            data = b""
        if not data and self._host is None and not self._leaving:
            if self._joins_next():
                return True
            self._end(gone(self.host))
            self._tell(self.generation, gone(self.host))
        return not self._leaving or bool(data)

    def _complain(self, number: int, seconds: float) -> None:
        if self._host is None:
            late = {"generation": self.generation, "number": number, "seconds": seconds, "reopens": self._reopens}
            self._send({"op": "late", **late}, owed=True)
        elif self.waiting:
            self._expire(self.generation)

    def _expire(self, generation: int) -> None:
        with self._changed:
            self.expired = True
            self._changed.notify_all()
        self.breaks(generation)

    def _handle(self, message: Message) -> None:
        match message["op"]:
            case "ask":
                status = asdict(self.place.status(self.waiting))
                self._send({"op": "alive", "round": message["round"], "status": status})
            case "told":
                self._tell(message["generation"], Failure(**message["failure"]))
            case "expire":
                if self.waiting and self.waits == message["number"]:
                    self._expire(message["generation"])
            case "value" | "met":
                with self._changed:
                    self._values[message["key"]] = message["value"]
                    self._changed.notify_all()
                if message["op"] == "met":
                    self.meets(message["key"])
            case "opened":
                with self._changed:
                    self._opening = None
                    self._opened, self.living = message["generation"], tuple(message["living"])
                    self._values.clear()
                    self._changed.notify_all()
            case "closing":
                self._end(left(self.host))
                with suppress(OSError):
                    self._socket.shutdown(socket.SHUT_WR)

    def _tell(self, generation: int, failure: Failure) -> None:
        with self._changed:
            self._verdicts.setdefault(generation, failure)
            self._changed.notify_all()
        self._break_if_needed(generation)

    def _break_if_needed(self, generation: int) -> None:
        if self.must_break(generation):
            self.breaks(generation)
            if (patience := self.place.patience) is not None:
                self.rescue.begin(self._verdicts[generation], patience)
            if generation <= self._reported:
                self.rescue.over()


class MonitorStore(dist.Store):
    """Stores values under `prefix` in the monitor's generation. Has only the methods that backends need to connect.

    If `rank` is given, this rank meets each rank whose value it reads: keys end in the number of a rank.
    """

    def __init__(self, monitor: Monitor, prefix: str, rank: int | None = None) -> None:
        super().__init__()
        self._monitor = monitor
        self._prefix = prefix
        self._path = f"{monitor.generation}/{prefix}"  # a thread that comes too late finds nothing of the next one
        self._rank = rank

    def set(self, key: str, value: str | bytes) -> None:
        self._monitor.set(f"{self._path}/{key}", value.encode() if isinstance(value, str) else bytes(value))

    def get(self, key: str) -> bytes:
        path, _, peer = f"{self._path}/{key}".rpartition("/")
        meeting: dict[str, Any] = {} if self._rank is None else {"mine": f"{path}/{self._rank}", "peer": int(peer)}
        try:
            return self._monitor.get(f"{path}/{peer}", **meeting)
        except LinkError as error:
            raise RuntimeError(str(error)) from None

    def check(self, keys: list[str]) -> bool:
        """Returns False: torch's threads ask for signals between its own groups, which pipeflow does not send."""
        return False

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            self.get(key)
