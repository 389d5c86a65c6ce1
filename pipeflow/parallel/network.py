"""Network: finds the address of this machine that other ranks can reach."""

from __future__ import annotations

import ipaddress
import os
import socket
import struct
import sys
from collections.abc import Sequence
from contextlib import suppress


def resolve(host: str) -> str:
    """The address of `host` as this machine resolves it. Raises OSError."""
    return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])


def is_loopback(address: str) -> bool:
    """Returns True if `address` can be reached from its own machine only."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def reachable(seen: Sequence[str]) -> str:
    """The first address of `seen` that is no loopback address, or the first of all if each is one. `seen` are the
    addresses that the machines know one machine by.
    """
    return next((address for address in seen if not is_loopback(address)), seen[0])


def address_towards(address: str) -> str:
    """This machine's own address on the route to `address`, which may be itself. Sends nothing."""
    if is_loopback(address):
        return address
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))
        return str(probe.getsockname()[0])


def use_interface_of(address: str) -> None:
    """Makes torch's own gloo groups use the network interface of `address`, unless GLOO_SOCKET_IFNAME is set.

    By default they use the interface of the machine's name, which is 127.0.1.1 on many machines.
    """
    name = "lo" if is_loopback(address) and sys.platform == "linux" else _interface(address)
    if name is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


def _interface(address: str) -> str | None:
    """The name that Linux gives to the interface with this IPv4 address."""
    if sys.platform != "linux" or ":" in address:
        return None
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):
                request = struct.pack("256s", name.encode()[:15])
                found = fcntl.ioctl(probe.fileno(), 0x8915, request)[20:24]  # SIOCGIFADDR
                if socket.inet_ntoa(found) == address:
                    return name
    return None
