"""The options of `pipeflow plan` that describe a cluster, and this cluster. Must not contain: plans."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pipeflow.core.errors import UsageError
from pipeflow.planning.cluster import Cluster
from pipeflow.planning.device import DEVICES
from pipeflow.tools.cli.options import Parser, argument, flag, values_of

CLUSTER = {
    "devices_per_node": "node (default: 72 for gb200 and gb300, else 8); 8:3,4 are 3 nodes of 8 and others of 4",
    "link_bandwidth": "inside a node, one way (default: the device's)",
    "network_bandwidth": "between nodes, one way (default: 25e9)",
    "devices_per_nic": "network card; a lone sender gets full bandwidth (default: 1)",
}
Counted = tuple[str, int | None]  # what nodes are, and how many there are; None: as many as needed


def add_cluster(command: Parser) -> None:
    """With one of --device and --cluster, times are in seconds."""
    add = command.add_argument_group("cluster", "gives times in seconds, with all communication").add_argument
    several = "; several kinds with their nodes"
    add("--device", metavar="DEVICE", help=f"{', '.join(DEVICES)}{several}: h100-80gb:8,a100-80gb:8")
    help_ = f"a cluster file, which `pipeflow calibrate` writes{several}: one.json:8,other.json:8"
    add("--cluster", metavar="FILE", help=help_)
    for name, help_ in CLUSTER.items():
        if name.endswith("bandwidth"):
            add(flag(name), type=argument(rate), metavar="X", help=f"bytes/s of a device {help_}")
        else:
            read = argument(node_sizes) if name == "devices_per_node" else int
            add(flag(name), type=read, metavar="N", help=f"devices that share a {help_}")


def rate(text: str) -> float:
    """A number of bytes/s. Raises UsageError for anything else, such as one with a unit."""
    try:
        return float(text)
    except ValueError:
        raise UsageError(
            f"it must be a number in bytes/s, such as 25e9 for 25 GB/s or 200 Gbit/s; got {text!r}"
        ) from None


def counted(text: str) -> list[Counted]:
    """The parts of a list such as "h100:8,a100": each with its number of nodes. Raises UsageError for an empty part,
    and for a number that is none.
    """
    found: list[Counted] = []
    for part in text.split(","):
        what, colon, nodes = part.partition(":")
        if not what.strip() or (colon and not nodes.strip().isdecimal()):
            raise UsageError(f"it must be one kind, or several with their nodes such as first:8,second:8; got {text!r}")
        found.append((what.strip(), int(nodes) if colon else None))
    return found


def node_sizes(text: str) -> list[Counted]:
    """The sizes of nodes in a list such as "8:3,4". Raises UsageError for a size that is no whole number."""
    sizes = counted(text)
    for size, _ in sizes:
        if not size.removeprefix("-").isdecimal():
            raise UsageError(f"it must be a whole number, or several with their nodes such as 8:3,4; got {text!r}")
    return sizes


def cluster_of(arguments: argparse.Namespace) -> Cluster | None:
    """The cluster that the options describe; None where there are none. Raises UsageError for numbers without a device,
    for kinds and sizes of nodes that do not fit each other, and as Cluster.
    """
    given = values_of(arguments, CLUSTER)
    if arguments.device is not None and arguments.cluster is not None:
        raise UsageError("--device and --cluster both say what the devices are: give one of them")
    if arguments.cluster is not None:
        is_one = os.path.exists(arguments.cluster)
        files: list[Counted] = [(arguments.cluster, None)] if is_one else counted(arguments.cluster)
        kinds = [_with_nodes(group, nodes) for file, nodes in files for group in Cluster.load(file).groups]
    elif arguments.device is not None:
        # the link of an unknown device is among the other options
        link = {"link_bandwidth": given.get("link_bandwidth")}
        kinds = [_with_nodes(Cluster.of(name, **link), nodes) for name, nodes in counted(arguments.device)]
    elif given:
        verb = "describes" if len(given) == 1 else "describe"
        raise UsageError(f"{', '.join(map(flag, given))} {verb} a cluster: say of which devices, with --device")
    else:
        return None
    first, *further = _sized(kinds, given.pop("devices_per_node", None), given)
    return replace(first, further=tuple(further))


def _with_nodes(group: Cluster, nodes: int | None) -> Cluster:
    return group if nodes is None else replace(group, nodes=nodes)


def _sized(kinds: Sequence[Cluster], sizes: list[Counted] | None, others: dict[str, Any]) -> list[Cluster]:
    """The groups of nodes of these kinds and sizes, with other numbers that hold for all. One kind may have several
    sizes, and several kinds one. Raises UsageError for other numbers of them, and for two numbers of nodes.
    """
    if sizes is None:
        return [replace(kind, **others) for kind in kinds]
    many = max(len(kinds), len(sizes))
    if {len(kinds), len(sizes)} - {1, many}:
        raise UsageError(
            f"--devices-per-node has {len(sizes)} sizes for {len(kinds)} kinds of nodes: give one size, or one for each"
        )
    found = []
    for kind, (size, nodes) in zip([*kinds] * (many // len(kinds)), [*sizes] * (many // len(sizes)), strict=True):
        if None not in (kind.nodes, nodes) and kind.nodes != nodes:
            raise UsageError(f"{kind.device.name} has {kind.nodes} nodes and {nodes} nodes: give one number of them")
        own = kind.nodes if nodes is None else nodes
        found.append(replace(kind, devices_per_node=int(size), nodes=own, **others))
    return found
