"""Options that describe a cluster, for commands that plan on one."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import TYPE_CHECKING

from pipeflow.cli.options import flag
from pipeflow.core.errors import UsageError
from pipeflow.planning.cluster import Cluster
from pipeflow.planning.device import DEVICES

if TYPE_CHECKING:
    from pipeflow.cli.options import Parser

_NUMBERS = {
    "devices_per_node": (int, "N", "devices that share a node (default: 8)"),
    "link_bandwidth": (float, "X", "bytes/s of a device inside a node, one way (default: the device's)"),
    "network_bandwidth": (float, "X", "bytes/s of a device between nodes, one way (default: 25e9)"),
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
        raise UsageError(f"{', '.join(map(flag, given))} describe a cluster: say of which devices, with --device")
    return None
