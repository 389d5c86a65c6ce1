"""Options that describe a cluster, for commands that plan on one."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from pipeflow.cli.options import flag
from pipeflow.core.errors import UsageError
from pipeflow.planning.cluster import Cluster
from pipeflow.planning.device import DEVICES

if TYPE_CHECKING:
    from pipeflow.cli.options import Parser


def rate(text: str) -> float:
    """A number of bytes/s. Raises ArgumentTypeError for anything else, such as one with a unit."""
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"it must be a number in bytes/s, such as 25e9 for 25 GB/s or 200 Gbit/s; got {text!r}"
        ) from None


_NUMBERS: dict[str, tuple[Callable[[str], float], str, str]] = {
    "devices_per_node": (int, "N", "devices that share a node (default: 72 for gb200 and gb300, else 8)"),
    "link_bandwidth": (rate, "X", "bytes/s of a device inside a node, one way (default: the device's)"),
    "network_bandwidth": (rate, "X", "bytes/s of a device between nodes, one way (default: 25e9)"),
    "devices_per_nic": (int, "N", "devices that share a network card: one that sends alone has it all (default: 1)"),
}


def add_cluster(command: Parser) -> None:
    """The options; with one of --device and --cluster, times are in seconds."""
    group = command.add_argument_group("cluster", "gives times in seconds, with all communication")
    group.add_argument("--device", metavar="DEVICE", help=", ".join(DEVICES))
    group.add_argument("--cluster", metavar="FILE", help="a cluster file, which `pipeflow calibrate` writes")
    for name, (kind, metavar, help_) in _NUMBERS.items():
        group.add_argument(flag(name), type=kind, metavar=metavar, help=help_)


def cluster_of(arguments: argparse.Namespace) -> Cluster | None:
    """The cluster that the options describe; None where there are none. Raises UsageError for numbers without a device,
    and as Cluster.
    """
    given = {name: getattr(arguments, name) for name in _NUMBERS if getattr(arguments, name) is not None}
    if arguments.device is not None and arguments.cluster is not None:
        raise UsageError("--device and --cluster both say what the devices are: give one of them")
    if arguments.cluster is not None:
        return replace(Cluster.load(arguments.cluster), **given)
    if arguments.device is not None:
        return Cluster.of(arguments.device, **given)
    if given:
        verb = "describes" if len(given) == 1 else "describe"
        raise UsageError(f"{', '.join(map(flag, given))} {verb} a cluster: say of which devices, with --device")
    return None
