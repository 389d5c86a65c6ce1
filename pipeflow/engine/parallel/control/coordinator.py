"""Coordinator: a thread of rank 0 to which every rank is connected. It notices ranks that die, asks ranks whether they
live, decides which failure was the first, and stores the addresses by which ranks find each other.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import math
import secrets
import socket
import threading
import time
from asyncio import StreamReader, StreamWriter
from collections import defaultdict
from collections.abc import Coroutine, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any

from pipeflow.core.errors import Failure
from pipeflow.engine.parallel.control import wire
from pipeflow.engine.parallel.control.diagnosis import (
    Status,
    absent,
    diagnose,
    gone,
    in_wait,
    is_left_alone,
    left,
    mismatch,
    silent,
    standstill,
    waits,
)
from pipeflow.engine.parallel.control.wire import Message, forget_in_children

# Theory of operation
#
# When one rank fails, the others wait for messages that never come. Each rank would see another error, and the ranks
# that it waits for are innocent. So one thread of rank 0 decides, once per generation, which failure was the first, and
# every rank raises that one. A generation is the time between two openings of all channels.
#
# - A rank that raises reports its error. `_settle` keeps the first and tells it to all, once; who asks later gets the
#   same answer alone. So a failure of R ranks is R messages, not R x R.
#   If the ranks do different things in that call, the error says so: `_compare`.
# - A rank whose process ends closes its socket: `_lose`.
# - A rank whose channel broke does not know why. `_investigate` asks all ranks whether they live. A peer that died or
#   reported an error is found within the grace; only if all live is the connection itself to blame.
# - A rank that waits longer than the timeout asks. Each rank answers from a thread, even while it computes, and says
#   for whom it waits. `diagnosis` follows these waits to the rank at their end: it may compute (then all go on, and a
#   warning names it), hang, or be silent. Otherwise the rank that asked breaks its channels and reports. Ranks that ask
#   at about the same time share one round of answers.
#
# Asking costs nothing as long as all is well, since nobody asks before the timeout. A new connection proves with the
# job's secret that it is a rank; until then it may only send a few bytes.

LOG = logging.getLogger("pipeflow")
_TO_PROVE = 5.0  # seconds
_TO_COMPARE = 0.25  # seconds for all ranks to say what they do, when one has failed
_TOGETHER = 1e-4  # seconds per rank of the world for which a round waits for others that ask for one
_STRANGERS = 64  # connections, beside those of all ranks, that have not proved yet to be a rank
_TO_HEAR = 1.0  # seconds, at the end, for the ranks to read what they were sent
_TO_END = 5.0  # seconds for the thread; it is a daemon, so it does not keep the process alive


class Coordinator:
    """Serves a world on a thread of its own until `close`. Accepts one connection per rank, then no more.

    Args:
        address: address of this machine at which the others reach it; it listens on no other.
        size: number of ranks.
        secret: key of the job; connections that do not know it are rejected.
        grace: seconds within which a live rank answers.
        elastic: whether the ranks that are left open channels when others have died.

    Attributes:
        port: the port on which it listens.
        secret: the key of the job.
    """

    def __init__(self, address: str, size: int, secret: bytes, grace: float, *, elastic: bool = False) -> None:
        self._size = size
        self.secret = secret
        self._grace = grace
        self._elastic = elastic
        self._socket = socket.create_server((address, 0))
        self.port: int = self._socket.getsockname()[1]
        self._loop = asyncio.new_event_loop()
        self._closing = asyncio.Event()
        self._strangers = 0
        self._writers: dict[int, StreamWriter] = {}
        self._gone: dict[int, Failure] = {}
        self._without: set[int] = set()  # those of them without which the last generation was opened
        self._tasks: set[asyncio.Task[None]] = set()
        self._values: dict[str, str] = {}
        self._wanted: defaultdict[str, list[tuple[int, Message]]] = defaultdict(list)  # by key, who asked for it
        self._arrived: defaultdict[int, set[int]] = defaultdict(set)  # by generation
        self._generation = 0  # the last that all ranks have opened
        self._opened = -1  # the last that this coordinator has opened
        self._succeeds = False  # another coordinator, whose rank has died
        self._failures: dict[int, Failure] = {}  # by generation, the first
        self._blames: dict[tuple[int, int], Failure] = {}  # by generation and by the rank that gave up
        # by number, what ranks have answered, and whether all have
        self._rounds: dict[int, tuple[dict[int, Status], asyncio.Event]] = {}
        self._upcoming: dict[float, asyncio.Task[dict[int, Status | Failure]]] = {}  # rounds, by how long they take
        self._asked = 0
        self._named: dict[int, float] = {}  # by rank, when it was last said that others wait for it
        forget_in_children(self.sockets)
        self._thread = threading.Thread(target=self._run, name="pipeflow coordinator", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Tells the connected ranks that it leaves, and ends the thread. May be called again."""
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._closing.set)
        self._thread.join(_TO_END)

    def sockets(self) -> list[int]:
        """The file descriptors of all connections."""
        found = [self._socket, *(writer.get_extra_info("socket") for writer in self._writers.values())]
        return [each.fileno() for each in found]

    def _run(self) -> None:
        self._loop.run_until_complete(self._serve())
        self._loop.close()

    async def _serve(self) -> None:
        self._server = await asyncio.start_server(self._meet, sock=self._socket, backlog=self._size + _STRANGERS)
        await self._closing.wait()
        self._server.close()
        self._broadcast({"op": "closing"})
        writers, self._writers = self._writers, {}
        for writer in writers.values():
            writer.write_eof()
        if writers:  # each rank hangs up when it has read all
            hearing = [asyncio.create_task(writer.wait_closed()) for writer in writers.values()]
            await asyncio.wait(hearing, timeout=_TO_HEAR)
        remaining = asyncio.all_tasks() - {asyncio.current_task()}
        for task in remaining:
            task.cancel()
        await asyncio.gather(*remaining, return_exceptions=True)

    async def _meet(self, reader: StreamReader, writer: StreamWriter) -> None:
        unpacker, rank = wire.Unpacker(wire.GREETING), None
        try:
            rank = await self._recognize(reader, writer, unpacker)
            while data := await reader.read(1 << 16):
                for message in unpacker.feed(data):
                    self._handle(rank, message)
        except (OSError, ValueError, KeyError, TypeError, TimeoutError, asyncio.CancelledError):
            pass  # as good as gone; asyncio would write the traceback of one that `_serve` cancels at its end
        finally:
            if rank is not None:
                self._lose(rank)
                self._writers.pop(rank, None)
            writer.close()

    async def _recognize(self, reader: StreamReader, writer: StreamWriter, unpacker: wire.Unpacker) -> int:
        """The rank behind a connection. Raises ValueError if it cannot prove that it belongs to the job."""
        self._strangers += 1
        try:
            if self._strangers > _STRANGERS + self._size:
                raise ValueError("too many strangers")
            challenge = secrets.token_hex(16)
            writer.write(wire.pack({"challenge": challenge}))
            async with asyncio.timeout(_TO_PROVE):
                greeting: Message | None = None
                while greeting is None:
                    if not (data := await reader.read(1 << 10)):
                        raise ValueError("nothing was said")
                    greeting = next(unpacker.feed(data), None)
        finally:
            self._strangers -= 1
        rank = int(greeting["rank"])
        proof = wire.prove(self.secret, challenge, rank)
        if not hmac.compare_digest(proof, str(greeting["proof"])) or rank in self._writers or rank in self._gone:
            raise ValueError("no rank of this job")
        unpacker.longest = wire.LONGEST
        self._writers[rank] = writer
        writer.write(wire.pack({"op": "welcome"}))
        if len(self._writers) == self._size:
            self._server.close()
        return rank

    def _handle(self, rank: int, message: Message) -> None:
        match message["op"]:
            case "set":
                self._set(message["key"], message["value"])
            case "get":
                self._get(rank, message)
            case "open":
                self._open(rank, message["generation"])
            case "report":
                self._spawn(self._compare(rank, message["generation"], Failure(**message["failure"])))
            case "lost":
                self._spawn(self._investigate(rank, message))
            case "suspects":
                self._spawn(self._confront(rank, message["generation"]))
            case "late":
                self._spawn(self._examine(rank, message))
            case "alive":
                self._answer(rank, message)
            case "bye":
                self._let_go(rank, left(rank))
            case "succeed":
                self._succeed(message)

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _send(self, rank: int, message: Message) -> None:
        if rank in self._writers:
            self._writers[rank].write(wire.pack(message))

    def _broadcast(self, message: Message) -> None:
        for rank in self._writers:
            self._send(rank, message)

    def _set(self, key: str, value: str) -> None:
        self._values[key] = value
        for rank, message in self._wanted.pop(key, ()):
            self._get(rank, message)

    def _get(self, rank: int, message: Message) -> None:
        """Tells a rank a value. If it wants to meet the rank whose value that is, tells that rank the other's value."""
        key, mine = message["key"], message.get("mine")
        if key not in self._values:
            self._wanted[key].append((rank, message))
            return
        self._send(rank, {"op": "value", "key": key, "value": self._values[key]})
        if mine in self._values:
            self._send(message["peer"], {"op": "met", "key": mine, "value": self._values[mine]})

    def _open(self, rank: int, generation: int) -> None:
        """Lets all ranks go on when the last has opened the generation; if a rank cannot, reports a failure."""
        if generation <= self._opened:  # it came twice, when the rank came here from another coordinator
            return
        self._arrived[generation].add(rank)
        if generation in self._failures:
            self._settle(generation, self._failures[generation], rank)
        else:
            self._open_if_all(generation)

    def _open_if_all(self, generation: int) -> None:
        """Opens the generation if all ranks have arrived, in an elastic world those that have not died. Reports a
        failure if one of them cannot.
        """
        if self._succeeds and generation <= self._generation:  # some ranks have opened it, and it has failed there
            self._settle(generation, next(reversed(self._gone.values())))
            return
        elastic = self._elastic and generation > 0
        living = set(range(self._size)) - {rank for rank, it in self._gone.items() if elastic and not it.left}
        if missed := next((self._gone[rank] for rank in living if rank in self._gone), None):
            self._settle(generation, missed)
        elif self._arrived[generation] >= living:
            self._arrived.clear()
            self._generation = self._opened = generation
            self._without = set(self._gone)
            self._values.clear()
            self._broadcast({"op": "opened", "generation": generation, "living": sorted(living)})

    def _succeed(self, message: Message) -> None:
        """A rank comes here from a coordinator that has died, and tells what it knows."""
        if not self._succeeds:
            self._succeeds = True
            self._spawn(self._count())
        self._gone |= {rank: gone(rank) for rank in message["gone"] if rank not in self._gone}
        self._generation = max(self._generation, message["opened"])
        for generation in self._arrived.keys() - self._failures.keys():
            self._open_if_all(generation)

    async def _count(self) -> None:
        """Ranks that have not come here within the grace have died, too."""
        await asyncio.sleep(self._grace)
        for rank in set(range(self._size)) - {*self._writers, *self._gone}:
            self._lose(rank)

    def _lose(self, rank: int) -> None:
        """A rank that hangs up without a goodbye has died; that fails the current generation."""
        if rank not in self._gone:
            blame, generation = gone(rank), self._generation
            self._let_go(rank, blame)  # which may open the next generation
            self._settle(generation, blame)

    def _let_go(self, rank: int, blame: Failure) -> None:
        """Ends everything that cannot go on without `rank`."""
        self._gone[rank] = blame
        for generation in self._arrived.keys() - self._failures.keys():
            self._open_if_all(generation)
        for number in self._rounds:
            self._check(number)

    def _settle(self, generation: int, failure: Failure, by: int | None = None) -> None:
        """Tells all ranks the first failure of a generation. When they know it, tells only rank `by`, which asks."""
        is_known = generation in self._failures
        first = self._failures.setdefault(generation, failure)
        told: Message = {"op": "told", "generation": generation, "failure": asdict(first)}
        if not is_known:
            self._broadcast(told)
        elif by is not None:
            self._send(by, told)

    async def _compare(self, by: int, generation: int, failure: Failure) -> None:
        """Rank `by` reports a failure. If the ranks do different things in that call, the failure follows from it."""
        if generation not in self._failures and failure.number is not None:
            found = mismatch(failure.number, await self._ask_everybody(min(_TO_COMPARE, self._grace)))
            failure = failure if found is None else failure.following(found.rank, found.reason)
        self._settle(generation, failure, by)

    async def _confront(self, by: int, generation: int) -> None:
        """Rank `by` compares something with ranks that may do something else, and waits."""
        statuses = await self._ask_everybody(self._grace)
        status = statuses[by]
        found = mismatch(status.number, statuses) if isinstance(status, Status) else None
        if found is not None and isinstance(status, Status):
            self._settle(generation, replace(found, number=status.number), by)

    async def _investigate(self, by: int, message: Message) -> None:
        """A channel of rank `by` broke, or it gave up. The rank that caused this has reported an error, has died, or
        will report soon.
        """
        generation, peer, waited = message["generation"], message["peer"], message["waited"]
        blame = self._blames.get((generation, by)) or self._missed().get(peer)
        if blame is None and generation not in self._failures:
            statuses = await self._ask_everybody(self._grace)
            blames = [status for status in statuses.values() if isinstance(status, Failure)]
            blames += [blame for (when, _), blame in self._blames.items() if when == generation]
            blame = (
                blames[0]
                if blames
                else Failure(peer, f"its connection to rank {by} broke, though both live ({message['why']})")
            )
        self._settle(generation, self._failures[generation] if blame is None else in_wait(blame, waited), by)

    async def _examine(self, by: int, message: Message) -> None:
        """Rank `by` has waited too long: finds the rank at the end of the chain of waits. Or its call takes long: it
        may be in a collective of another library, with a rank that does not answer.
        """
        generation = message["generation"]
        statuses = await self._ask_everybody(self._grace)
        blame, failed = diagnose(by, message["seconds"], statuses), self._failures.get(generation)
        if message["reopens"]:
            blame = blame or absent(by, message["seconds"], statuses)
        ends = blame is not None if failed is None else is_left_alone(by, statuses, failed)
        if blame is not None and failed is None:
            self._blames[generation, by] = blame
        if not waits(by, statuses):
            if blame is not None:
                self._settle(generation, blame, by)
        elif ends:
            self._send(by, {"op": "expire", "generation": generation, "number": message["number"]})
        elif blame is None:
            self._say(by, message["seconds"], statuses)

    def _say(self, by: int, seconds: float, statuses: Mapping[int, Status | Failure]) -> None:
        """Logs for which rank the others wait without an error: once, and again each time the wait has doubled."""
        found, now = standstill(by, statuses), time.monotonic()
        if found is not None and now - self._named.get(found.rank, -math.inf) >= seconds / 2:
            self._named[found.rank] = now
            LOG.warning("rank %d has waited %.3g s for rank %d: %s", by, seconds, found.rank, found.reason)

    async def _ask_everybody(self, seconds: float) -> dict[int, Status | Failure]:
        """The status of every rank, or the blame for one that is gone or silent for `seconds`. No answer is older than
        the question.
        """
        if seconds not in self._upcoming:
            self._upcoming[seconds] = self._loop.create_task(self._round(seconds))
        return await self._upcoming[seconds]

    async def _round(self, seconds: float) -> dict[int, Status | Failure]:
        await asyncio.sleep(_TOGETHER * self._size)
        del self._upcoming[seconds]
        self._asked += 1
        number, (answers, complete) = self._asked, (dict[int, Status](), asyncio.Event())
        self._rounds[number] = answers, complete
        self._broadcast({"op": "ask", "round": number})
        with suppress(TimeoutError):
            await asyncio.wait_for(complete.wait(), seconds)
        del self._rounds[number]
        ranks = sorted(set(range(self._size)) - self._without)
        return {rank: self._gone.get(rank) or answers.get(rank) or silent(rank) for rank in ranks}

    def _missed(self) -> dict[int, Failure]:
        """The ranks of this generation that are gone."""
        return {rank: blame for rank, blame in self._gone.items() if rank not in self._without}

    def _answer(self, rank: int, message: Message) -> None:
        if message["round"] in self._rounds:
            self._rounds[message["round"]][0][rank] = Status(**message["status"])
            self._check(message["round"])

    def _check(self, number: int) -> None:
        answers, complete = self._rounds[number]
        if len(answers.keys() | self._gone.keys()) == self._size:
            complete.set()
