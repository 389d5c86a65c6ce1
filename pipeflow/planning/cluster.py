"""Cluster: many devices in nodes, of one kind or of several, the links between them, and how much longer products of
measured shapes take than the coefficients of `Efficiency` say. Must not contain: what a model costs on it, where a
layout lies on it, and how it is measured.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import KW_ONLY, asdict, dataclass, field, fields, replace
from functools import lru_cache
from typing import Any, NamedTuple

from pipeflow.core.errors import UsageError, require_type
from pipeflow.core.files import is_number, parse, read_text, replacing
from pipeflow.core.placement import require_positive
from pipeflow.planning.blocks import divisors
from pipeflow.planning.device import DEVICES, LINK_BANDWIDTHS, NODE_SIZES, Device, require_bandwidth, require_between
from pipeflow.planning.engines import COMMUNICATOR, CONTEXT

UNITS = {
    "flops": "FLOP/s",
    "memory_bytes": "bytes",
    "memory_bandwidth": "bytes/s",
    "host_bandwidth": "bytes/s, one way",
    "host_step": "parameters/s",
    "link_bandwidth": "bytes/s per device, one way",
    "link_latency": "s",
    "network_bandwidth": "bytes/s per device, one way",
    "network_latency": "s",
}
"""Of the numbers in a cluster file, which holds this table, too."""

NETWORK_BANDWIDTH = 25e9  # bytes/s per device, of 200 Gbit/s

ALLOWANCE = 0.015
"""Share of a device's memory that no process gets: torch sees 78.8 to 79.3 GiB of 80, and 39.4 of 40."""


class ShapeTime(NamedTuple):
    """A measured shape of products.

    Attributes:
        rows: rows, which are tokens.
        shortest: the shorter dimension of the weight.
        longer: how many times as long such a product takes as the coefficients say.
    """

    rows: float
    shortest: float
    longer: float


@dataclass(frozen=True, slots=True)
class Cluster:
    """Devices of one kind, `devices_per_node` of them in each node. Nodes of other kinds or sizes follow as `further`.

    Attributes:
        device: the device, the same in all nodes but those of `further`.
        devices_per_node: devices that reach each other over `link_bandwidth`.
        link_bandwidth: bytes/s that one device sends to others of its node. It may receive as many at the same time.
        link_latency: seconds until the first byte of such a transfer arrives.
        network_bandwidth, network_latency: the same between nodes, for one device while all devices of its node send.
        devices_per_nic: devices of a node that share one network card. While only one of them sends, it has the
            bandwidth of all.
        sharing: ranks that share one processor, such as 2 for 4 processes on 2 cores. The device's rates are then those
            while all these ranks compute; while some wait, the others are faster. 1 if each rank has its own device.
        efficiency: measured coefficients of a cost model, by name.
        shapes: measured products, as `ShapeTime`.
        nodes: number of nodes. None: as many as needed.
        further: groups of other nodes, each a cluster without `further`. Layouts take the devices of the first group
            first. The slower of two networks is that between them.

    >>> Cluster.of("a100-80gb", network_bandwidth=12.5e9).link_bandwidth
    300000000000.0

    Raises UsageError for bandwidths under 1 MB/s or over 100 TB/s and latencies over 1 s, whose unit must be wrong.
    Also raises it for groups whose number of nodes is not known, and for `sharing` beside other groups.
    """

    device: Device
    _: KW_ONLY
    devices_per_node: int = 8
    link_bandwidth: float
    link_latency: float = 5e-6
    network_bandwidth: float = NETWORK_BANDWIDTH
    network_latency: float = 1e-5
    devices_per_nic: int = 1
    sharing: float = 1.0
    efficiency: Mapping[str, float] = field(default_factory=dict, hash=False)
    shapes: tuple[ShapeTime, ...] = ()
    nodes: int | None = None
    further: tuple[Cluster, ...] = ()

    def __post_init__(self) -> None:
        require_positive(devices_per_node=self.devices_per_node, devices_per_nic=self.devices_per_nic)
        if self.nodes is not None:
            require_positive(nodes=self.nodes)
        if self.devices_per_node % self.devices_per_nic:
            raise UsageError(
                f"{self.devices_per_nic} devices per network card do not divide {self.devices_per_node} of a node: use "
                f"{' or '.join(map(str, divisors(self.devices_per_node)))}"
            )
        for name in ("link_bandwidth", "network_bandwidth"):
            require_bandwidth(name, getattr(self, name))
        for name in ("link_latency", "network_latency"):
            require_between(0, 1, name, getattr(self, name), "seconds, not microseconds: 5 microseconds are 5e-6")
        require_between(1, 1e4, "sharing", self.sharing, "ranks on each processor, at least 1")
        object.__setattr__(self, "efficiency", dict(self.efficiency))
        object.__setattr__(self, "shapes", _shape_times(self.shapes))
        object.__setattr__(self, "further", tuple(self.further))
        if self.further:
            _require_groups(self.groups)

    @property
    def groups(self) -> tuple[Cluster, ...]:
        """The groups of nodes, each a cluster of its own."""
        return (replace(self, further=()), *self.further) if self.further else (self,)

    def taken(self, devices: int) -> tuple[tuple[Cluster, int], ...]:
        """The kinds of nodes that so many devices lie in, and how many devices lie in each: those of the first groups.
        Neighbours that are alike are one kind, and each has as many nodes as needed. Raises UsageError for more devices
        than there are.
        """
        return ((self, devices),) if self.nodes is None and not self.further else _taken(self, devices)

    def used(self, devices: int) -> Cluster:
        """The part of the cluster that so many devices lie in. Raises UsageError as `taken`."""
        *full, (last, _) = self.taken(devices)
        if not full:
            return last
        first, *more = (replace(kind, nodes=-(-many // kind.devices_per_node)) for kind, many in full)
        return replace(first, further=(*more, last))

    def alone(self, devices: int) -> Cluster:
        """The part of the cluster that so many devices lie in, which must be of one kind. Raises UsageError if it is
        not.
        """
        if (used := self.used(devices)).further:
            raise UsageError("plans of modules take devices of one kind, in nodes of one size: give one group of nodes")
        return used

    def is_one_node(self, devices: int) -> bool:
        """Whether so many devices lie in one node."""
        return not self.further and devices <= self.devices_per_node

    @property
    def usable_bytes(self) -> float:
        """The most bytes of a device in a plan: its memory minus ALLOWANCE."""
        return (1 - ALLOWANCE) * self.device.memory_bytes

    def outside_bytes(self, groups: int) -> int:
        """Bytes that a process takes from its device outside of tensors, with so many kinds of groups that communicate:
        a context, and a communicator for each. A CPU has neither.
        """
        return CONTEXT + groups * COMMUNICATOR if self.device.runs_ahead else 0

    @classmethod
    def of(cls, device: str | Device, **given: Any) -> Cluster:
        """Makes a cluster of a device, by its name in DEVICES or USUAL, or as a `Device`. It has the link and the nodes
        that the device is sold with, and a network of 200 Gbit/s (25e9 bytes/s) per device. `given` sets other
        attributes; None stands for the usual value.

        Raises UsageError for an unknown device, and for a device that is not in DEVICES without `link_bandwidth`.
        """
        known = Device.named(device) if isinstance(device, str) else device
        require_type("device", known, Device, "give its name, or a Device")
        given = {name: value for name, value in given.items() if value is not None}
        if "link_bandwidth" not in given:
            if known.name not in LINK_BANDWIDTHS:
                raise UsageError(
                    f"device {known.name!r} has no usual link: give link_bandwidth in bytes/s, in one direction"
                )
            given["link_bandwidth"] = LINK_BANDWIDTHS[known.name]
        given.setdefault("devices_per_node", NODE_SIZES.get(known.name, 8))
        return cls(known, **given)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Cluster:
        """Reads the cluster that `save` wrote, or one written by hand. `efficiency`, `shapes`, `sharing`,
        `devices_per_nic`, `nodes`, `units` and the device's `runs_ahead`, `like`, `limit`, `host_bandwidth` and
        `host_step` may be missing. Several groups of nodes are a list of such objects, named `groups`.

        Raises UsageError, which names the file, if it cannot be read or is not JSON. Also raises it for missing or
        unknown keys, other units, and impossible values.
        """
        text = read_text(path)
        try:
            return _from_json(text)
        except UsageError as error:
            raise UsageError(f"{os.fspath(path)}: {error}") from None

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the cluster as JSON, for `load`. An existing file is replaced atomically. Raises UsageError if the
        file cannot be written.
        """
        content = {"units": UNITS} | self.content()
        try:
            with replacing(path) as file:
                file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise UsageError(f"{os.fspath(path)}: {error.strerror}") from None

    def content(self) -> dict[str, Any]:
        """The values of a cluster file, without its units."""
        if self.further:
            return {"groups": [each.content() for each in self.groups]}
        values = asdict(self)
        del values["further"]
        if self.nodes is None:
            del values["nodes"]
        return values


@lru_cache(maxsize=256)
def _taken(cluster: Cluster, devices: int) -> tuple[tuple[Cluster, int], ...]:
    """As `Cluster.taken`, which a search asks for with each layout."""
    found: list[tuple[Cluster, int]] = []
    left = devices
    for group in cluster.groups:
        many = left if group.nodes is None else min(left, group.nodes * group.devices_per_node)
        kind = replace(group, nodes=None)
        if found and found[-1][0] == kind:
            found[-1] = kind, found[-1][1] + many
        elif many:
            found.append((kind, many))
        left -= many
    if left:
        raise UsageError(f"the cluster has {devices - left:,} devices, not {devices:,}: use fewer, or add nodes to it")
    return tuple(found)


def _require_groups(groups: tuple[Cluster, ...]) -> None:
    """Raises UsageError for groups that are none, and for those whose devices cannot be told apart or planned."""
    for each in groups:
        require_type("a group of further nodes", each, Cluster)
    if any(each.further for each in groups):
        raise UsageError("a group of further nodes has further ones: list all groups one after the other")
    if any(each.nodes is None for each in groups[:-1]):
        raise UsageError("each group of nodes before another one needs its number of nodes")
    if any(each.sharing > 1 for each in groups):
        raise UsageError("ranks that share processors (sharing) are planned in nodes of one kind alone")
    if len({each.device.runs_ahead for each in groups}) > 1:
        raise UsageError("devices of several kinds must all have the same runs_ahead: plan CPUs and GPUs apart")


def _from_json(text: str) -> Cluster:
    content = parse(text)
    if not (isinstance(content, dict) and "groups" in content):
        return _group(content)
    groups = content["groups"]
    if not isinstance(groups, list) or not groups:
        raise UsageError(f"groups must be a list of clusters, each with its nodes, got {groups!r}")
    if others := sorted(set(content) - {"groups", "units"}):
        raise UsageError(f"a cluster with groups has {', '.join(others)}, too: write these in each group")
    first, *further = (_group({"units": content.get("units", UNITS)} | _object(each)) for each in groups)
    return replace(first, further=tuple(further))


def _object(value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise UsageError(f"each of the groups must be an object such as a cluster file has, got {value!r}")
    return value


def _group(content: object) -> Cluster:
    """A cluster of one kind. Raises UsageError for wrong values."""
    known = {each.name for each in fields(Cluster)} - {"further"}
    optional = {"efficiency", "shapes", "sharing", "devices_per_nic", "nodes", "units"}
    cluster = _keys(content, "a cluster", known, optional=optional)
    _require_alike(cluster)
    known = {each.name for each in fields(Device)}
    named = {"runs_ahead", "like", "host_bandwidth", "limit", "host_step"}
    device = _keys(cluster["device"], "the device of a cluster", known, optional=named)
    units = cluster.pop("units", UNITS)
    if not isinstance(units, dict):
        raise UsageError(f"units must be an object of names and units, got {units!r}")
    for name, unit in units.items():
        if name not in UNITS:
            raise UsageError(f"units has unknown {name}; its keys are {', '.join(UNITS)}")
        if UNITS[name] != unit:
            raise UsageError(f"{name} is given in {unit!r}, but a cluster file has it in {UNITS[name]}: convert it")
    for name, numbers in (("flops", device["flops"]), ("efficiency", cluster.get("efficiency", {}))):
        if not isinstance(numbers, dict) or not all(map(is_number, numbers.values())):
            raise UsageError(f"{name} must be an object of names and numbers, got {numbers!r}")
    if not isinstance(cluster.get("shapes", []), list):
        raise UsageError(f"shapes must be a list of rows, got {cluster['shapes']!r}")
    if not isinstance(device["name"], str):
        raise UsageError(f"the name of the device must be text, got {device['name']!r}")
    if device["name"] in DEVICES:  # files of earlier versions leave it to the name
        device.setdefault("like", DEVICES[device["name"]].like)
        device.setdefault("host_bandwidth", DEVICES[device["name"]].host_bandwidth)
        device.setdefault("limit", DEVICES[device["name"]].limit)
    return Cluster(**cluster | {"device": Device(**device)})


def _require_alike(cluster: Mapping[str, Any]) -> None:
    """Raises UsageError for several kinds of devices in one group, and for nodes of several sizes."""
    for name in ("device", "devices_per_node"):
        if isinstance(cluster[name], list):
            raise UsageError(
                f"{name} must be one value: for several kinds or sizes of nodes, write groups, a list with an object "
                "such as this for each, which also has its nodes"
            )


def _keys(value: object, what: str, known: set[str], *, optional: frozenset[str] | set[str] = frozenset()) -> Any:
    """The object, if it has the keys that it must have and no others."""
    if not isinstance(value, dict):
        raise UsageError(f"{what} must be an object with {', '.join(sorted(known - optional))}; got {value!r}")
    missing, unknown = sorted(known - optional - set(value)), sorted(set(value) - known - optional)
    said = [f"lacks {', '.join(missing)}"] * bool(missing) + [f"has unknown {', '.join(unknown)}"] * bool(unknown)
    if said:
        raise UsageError(f"{what} {' and '.join(said)}; its keys are {', '.join(sorted(known | optional))}")
    return dict(value)


def _shape_times(rows: Iterable[Iterable[float]]) -> tuple[ShapeTime, ...]:
    """The rows of a table. Raises UsageError unless each has three positive, finite numbers."""
    found = tuple(tuple(row) if isinstance(row, list | tuple) else (row,) for row in rows)
    for row in found:
        if len(row) != 3 or not all(isinstance(each, int | float) and 0 < each < math.inf for each in row):
            raise UsageError(
                "shapes must have rows of three positive numbers (rows, shortest dimension of the weight, how many "
                f"times as long), got {row!r}"
            )
    return tuple(ShapeTime(*map(float, row)) for row in found)


@lru_cache(maxsize=4096)
def longer(table: tuple[ShapeTime, ...], rows: float, shortest: float) -> float:
    """How many times as long products of this shape take: the mean of what was measured, of the logarithms, where near
    shapes count most, by the square of their distance in doublings. 1 without a table.
    """
    weights, found = 0.0, 0.0
    for each in table:
        distance = math.log2(rows / each.rows) ** 2 + math.log2(shortest / each.shortest) ** 2
        if not distance:
            return each.longer
        weights += 1 / distance
        found += math.log(each.longer) / distance
    return math.exp(found / weights) if weights else 1.0
