"""A slow wire between two network namespaces, as root: what goes in at one end comes out at the other after the
latency, and no faster than the bandwidth. A TUN device at each end and a process between them, because not every
kernel has netem.
"""

from __future__ import annotations

import fcntl
import os
import select
import struct
import subprocess
import sys
import time
from collections import deque
from contextlib import suppress
from types import TracebackType
from typing import Self

SIDES = ("10.92.0.1", "10.92.0.2")


def can_lay() -> bool:
    return os.geteuid() == 0 and os.path.exists("/dev/net/tun") and _quietly("ip netns list")


class Wire:
    """Two namespaces, `sides`, whose interfaces `ends` are joined while this is entered.

    Args:
        latency: one way, in seconds.
        bandwidth: each way, in bytes per second.
    """

    def __init__(self, latency: float, bandwidth: float) -> None:
        self.sides = tuple(f"pfw{os.getpid()}{side}" for side in "ab")
        self._speed = [str(latency), str(bandwidth)]
        self._relay: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        try:
            command = [sys.executable, "-m", "benchmarks.wire", *self.sides, *self._speed]
            self._relay = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            assert self._relay.stdout is not None
            self._relay.stdout.readline()  # the devices are there, and have the names of their namespaces
            for side, address in zip(self.sides, SIDES, strict=True):
                for words in (
                    f"ip netns add {side}",
                    f"ip link set {side} netns {side}",
                    f"ip -n {side} addr add {address}/24 dev {side}",
                    f"ip -n {side} link set {side} up",
                    f"ip -n {side} link set lo up",
                    f"ip -n {side} route replace 10.92.0.0/24 dev {side} src {address} congctl cubic",
                ):
                    subprocess.run(words.split(), check=True)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._relay is not None:
            self._relay.kill()
            self._relay.wait()
        for side in self.sides:
            _quietly(f"ip netns del {side}")


def _quietly(words: str) -> bool:
    try:
        return subprocess.run(words.split(), capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


def tun(name: str) -> int:
    """Makes the device; what it sends can be read, what is written it receives, one IP packet at a time."""
    end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(end, 0x400454CA, struct.pack("16sH", name.encode(), 0x1001))  # TUNSETIFF, IFF_TUN | IFF_NO_PI
    return end


def relay(one: int, other: int, latency: float, bandwidth: float) -> None:
    """Carries packets both ways, for ever: each leaves when the one before it has, and arrives a latency later."""
    towards = {one: other, other: one}
    free = dict.fromkeys(towards, 0.0)  # per end, when the last packet has left
    flying: dict[int, deque[tuple[float, bytes]]] = {end: deque() for end in towards}
    while True:
        due = min((queue[0][0] for queue in flying.values() if queue), default=None)
        pause = None if due is None else max(0.0, due - time.monotonic())
        for end in select.select(list(towards), [], [], pause)[0]:
            packet = os.read(end, 1 << 16)
            free[end] = max(free[end], time.monotonic()) + len(packet) / bandwidth
            flying[towards[end]].append((free[end] + latency, packet))
        now = time.monotonic()
        for end, queue in flying.items():
            while queue and queue[0][0] <= now:
                with suppress(OSError):  # an end that is not up yet loses it
                    os.write(end, queue.popleft()[1])


if __name__ == "__main__":
    first, second, latency, bandwidth = sys.argv[1:]
    ends = tun(first), tun(second)
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))  # a wire is never busy with something else
    print("laid", flush=True)
    relay(*ends, float(latency), float(bandwidth))
