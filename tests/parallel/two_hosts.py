"""Two hosts, as two network namespaces joined by a cable, each with a name that its own /etc/hosts says is 127.0.1.1,
as Debian's does. Run as a program, it is one of their ranks.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist

import pipeflow
from pipeflow.engine.parallel.transport.agreement import all_gather

ADDRESSES = ["10.77.77.1", "10.77.77.2"]
NAMES = ["pipeflow-a", "pipeflow-b"]
_AS = 'hostname {} && mount --bind {} /etc/hosts && exec "$@"'


def available() -> bool:
    """Whether this machine lets one make them."""
    try:
        command = ["unshare", "--net", "--mount", "--uts", "ip", "netns"]
        return os.geteuid() == 0 and subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        return False


@contextmanager
def hosts(folder: Path) -> Iterator[list[list[str]]]:
    """What a command begins with to run on either."""
    spaces = [f"{name}-{os.getpid()}" for name in NAMES]
    try:
        for command in _cable(*spaces):
            subprocess.run(command.split(), check=True)
        for name, other, address in zip(NAMES, reversed(NAMES), reversed(ADDRESSES), strict=True):
            (folder / name).write_text(f"127.0.0.1 localhost\n127.0.1.1 {name}\n{address} {other}\n", encoding="utf-8")
        yield [
            [*f"ip netns exec {space} unshare --mount --uts sh -c".split(), _AS.format(name, folder / name), "sh"]
            for space, name in zip(spaces, NAMES, strict=True)
        ]
    finally:
        for space in spaces:
            subprocess.run(["ip", "netns", "del", space], check=False)


def _cable(first: str, second: str) -> list[str]:
    ends = [(first, f"pf{os.getpid()}a", ADDRESSES[0]), (second, f"pf{os.getpid()}b", ADDRESSES[1])]
    made = [f"ip netns add {space}" for space, _, _ in ends]
    made.append(f"ip link add {ends[0][1]} netns {first} type veth peer name {ends[1][1]} netns {second}")
    for space, link, address in ends:
        made.append(f"ip -n {space} addr add {address}/24 dev {link}")
        made += [f"ip -n {space} link set {each} up" for each in (link, "lo")]
    return made


def environment(rank: int, master: str, interface: str | None) -> dict[str, str]:
    """Of a rank of two, one a host."""
    places = {"RANK": rank, "LOCAL_RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": master, "MASTER_PORT": 29577}
    given = {} if interface is None else {"GLOO_SOCKET_IFNAME": interface}
    kept = {name: value for name, value in os.environ.items() if name != "GLOO_SOCKET_IFNAME"}
    return kept | {name: str(value) for name, value in places.items()} | given


def main(*, initialized: bool) -> None:
    if initialized:
        dist.init_process_group("gloo")
    context = pipeflow.launch(timeout=20)
    assert all_gather(context.world, [context.rank]) == [[0], [1]]
    sys.stdout.write("all are here\n")


if __name__ == "__main__":
    main(initialized=sys.argv[1:] == ["initialized"])
