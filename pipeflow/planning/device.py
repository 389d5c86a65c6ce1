"""Devices: the rates and the memory that a GPU is sold with. Must not contain: what is measured, and how devices are
connected into a cluster.

One device is what one rank computes on, and what torch counts as a device: an MI250X is two of them.

Sources: the data sheets of NVIDIA (V100, T4, A10, A100, A800, L4, L40S, H100, H800, H20, H200, HGX B200, HGX B300,
GB200 NVL72, GB300 NVL72) and AMD (CDNA 2 and CDNA 3). RTX 3090 and RTX 4090 are from NVIDIA's white papers on GA102 and
AD102. All rates are dense: half of the rates that data sheets give with sparsity. The rates of the RTX cards are those
with float32 sums, which are half of those with float16 sums. Memory is in GiB: a data sheet's "80 GB" of HBM is 80 GiB,
of which drivers and error correction take a few percent. Link bandwidths are in one direction: half of the number that
data sheets give for both.

Some values are not certain. H20, H800 and A800 have no public data sheet of NVIDIA, so the numbers are those of their
resellers. H100 with 96 GB is a part for single customers with slower HBM2e and 500 W instead of 700: its peaks are
those of H100 SXM at the clock that this power allows, .89 of it, since power grows with the third power of the clock.
Its bandwidth is an estimate. So is that of H100 with 64 GB, a part for MareNostrum 5; its peaks are .9 of those of
H100 SXM, since TOP500 counts 128 multiprocessors of each, which reach its 249 PFLOP/s of 4,480 at 1.7 GHz. A100 with
64 GB, a part for Leonardo (arXiv 2307.16885), has 124 multiprocessors instead of 108. B200 is sold with 180 and 192
GB, B300 with 270 and 288 GB. On Blackwell, 6 bits have the rate of 8. H100 NVL is joined in pairs (300e9 bytes/s), and
the two dies of an MI250X by 200e9 bytes/s. The link bandwidth here is that between pairs.

The link to the host is PCIe with 16 lanes, of generation 3 (16e9 bytes/s), 4 (32e9) or 5 (64e9) as the data sheets say;
B300 has generation 6 (128e9). In a GB200 and a GB300 it is NVLink-C2C, 450e9 bytes/s in one direction for two GPUs
together. An MI250X has one link of Infinity Fabric per die to the CPU (36e9, as in the documentation of Frontier,
OLCF). Copies reach some 80 % of PCIe's rates, and machines in which devices share a switch reach less.

What limits large products is known from measurements: the maximum achievable FLOP/s in ml-engineering's table, and for
T4 arXiv 1903.07486. Where nobody has published a measurement, the row leaves it open.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

from pipeflow.core.errors import UsageError, closest, unknown
from pipeflow.planning.efficiency import REACHES

LIMITS = ("", "power", "units")
SLOWEST, FASTEST = 1e6, 1e14  # bytes/s of a memory or a link: outside of it the unit must be wrong


@dataclass(frozen=True, slots=True)
class Device:
    """A device that computes.

    Attributes:
        name: a name in DEVICES, or any other name.
        flops: FLOP/s of dense products per precision: "fp16", "bf16", "fp8", "fp4", "tf32", "float32". A precision that
            the device has no units for is left out.
        memory_bytes: bytes of memory.
        memory_bandwidth: bytes/s that the memory reads or writes.
        runs_ahead: whether a host launches operations while the device computes earlier ones. A CPU does both, one
            after the other.
        like: the measured device, a name in `efficiency.REACHES`, that reaches about the same share of its rates. A
            device whose power is limited, such as H100, reaches less than A100.
        host_bandwidth: bytes/s that it copies to its host, and at the same time back. 0: not known.
        host_step: parameters/s that its part of the host's processors steps with Adam. By default an eighth of a host's
            4e9, which DeepSpeed's CPU Adam reached on one with two processors (arXiv 2101.06840, table 4).
        limit: what keeps large products under the rate of the data sheet: "power", if its clock falls while all units
            compute; "units", if it does not. "": not known.

    >>> Device.named("A100-80GB").flops["bf16"]
    312000000000000.0

    Raises UsageError for numbers that are not positive, for a `memory_bandwidth` whose unit must be wrong, and for an
    unknown `like`.
    """

    name: str
    flops: Mapping[str, float] = field(hash=False)
    memory_bytes: float
    memory_bandwidth: float
    runs_ahead: bool = True
    like: str = "a100"
    host_bandwidth: float = 0.0
    limit: str = ""
    host_step: float = 5e8

    def __post_init__(self) -> None:
        if not self.flops:
            raise UsageError(
                f"device {self.name!r} has no flops: give FLOP/s per precision, such as {{'bf16': 312e12}}"
            )
        for precision, rate in self.flops.items():
            require_between(1e6, 1e19, f"flops of {precision}", rate, "FLOP/s, not TFLOP/s: 312 TFLOP/s are 312e12")
        require_between(1e6, 1e15, "memory_bytes", self.memory_bytes, "bytes, not GB: 80 GB are 80e9")
        require_bandwidth("memory_bandwidth", self.memory_bandwidth)
        if self.host_bandwidth != 0:
            require_bandwidth("host_bandwidth", self.host_bandwidth)
        require_between(1e6, 1e12, "host_step", self.host_step, "parameters/s: 500 million are 5e8")
        if not isinstance(self.runs_ahead, bool):
            raise UsageError(f"runs_ahead must be True or False, got {self.runs_ahead!r}")
        if self.limit not in LIMITS:
            raise UsageError(f"limit must be 'power', 'units' or '' (not known), got {self.limit!r}")
        if str(self.like) not in REACHES:
            raise unknown("measured device", str(self.like), REACHES)
        object.__setattr__(self, "flops", dict(self.flops))

    def intensity(self, precision: str) -> float:
        """FLOP in the time of moving a number of a product. Products in 8 bits read those, and write 16 bits. 0 without
        units for the precision.
        """
        width = {"float32": 4.0, "tf32": 4.0, "fp8": 4 / 3, "fp4": 1.0}.get(precision, 2.0)
        return width * self.flops.get(precision, 0.0) / self.memory_bandwidth

    @classmethod
    def named(cls, name: str) -> Device:
        """The device `name` of DEVICES or USUAL, in upper or lower case, with hyphens, underscores or blanks. Raises
        UsageError for an unknown name, with the known ones.
        """
        written = name.strip().lower().replace("_", "-").replace(" ", "-")
        written = USUAL.get(written, written)
        if written not in DEVICES:
            raise UsageError(
                f"unknown device {name!r}; {_near(written)} describe any other one in a cluster file, with its flops, "
                "memory_bytes and memory_bandwidth"
            )
        return DEVICES[written]


def _near(written: str) -> str:
    """Asks for the devices whose names contain what was written, or else begin nearly as it does; or lists all."""
    series = closest(written.partition("-")[0], {name.partition("-")[0] for name in DEVICES}, cutoff=0.5)
    found = [name for name in DEVICES if written and written in name]
    found = found or [name for name in DEVICES if name.partition("-")[0] == series]
    return f"did you mean {' or '.join(found)}?" if found else f"known: {', '.join(DEVICES)};"


def require_bandwidth(name: str, value: object) -> None:
    """Raises UsageError for a bandwidth under 1 MB/s or over 100 TB/s."""
    require_between(
        SLOWEST, FASTEST, name, value, "bytes/s, not in GB/s or Gbit/s: 300 GB/s are 300e9, 200 Gbit/s are 25e9"
    )


def require_between(least: float, most: float, name: str, value: object, unit: str) -> None:
    """Raises UsageError unless `value` is a number from `least` to `most`; `unit` says what is expected, with an
    example.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
        raise UsageError(f"{name} must be a number in {unit}; got {value!r}")
    if least <= value <= most:
        return
    wrong = f"less than {least:g}" if value < least else f"more than {most:g}"
    raise UsageError(f"{name} is {value:g}, {wrong}: the unit is probably wrong. Give it in {unit}")


class _DeviceRow(NamedTuple):
    """A row of the table of devices: memory in GiB, three bandwidths in GB/s, the most similar measured device, what
    limits its products, and TFLOP/s. The bandwidths are those of the memory, of all links of one device in one
    direction, and of its link to the host in one direction. A rate is 0 if the device has no units for it. `node`: how
    many devices the links join.
    """

    name: str
    gib: int
    memory: float
    link: float
    host: float
    like: str
    limit: str
    half: float
    tf32: float
    single: float
    fp8: float = 0
    fp4: float = 0
    bf16: bool = True
    node: int = 8

    @property
    def device(self) -> Device:
        half = {"fp16": self.half, "bf16": self.half if self.bf16 else 0}
        rates = half | {"fp8": self.fp8, "fp4": self.fp4, "tf32": self.tf32, "float32": self.single}
        flops = {key: rate * 1e12 for key, rate in rates.items() if rate}
        size, memory, host = self.gib * 2**30, self.memory * 1e9, self.host * 1e9
        return Device(self.name, flops, size, memory, like=self.like, host_bandwidth=host, limit=self.limit)


_ALL = (  # a device that was not measured is like the nearest one that was
    _DeviceRow("v100-16gb", 16, 900, 150, 16, "a100", "units", 125, 0, 15.7, bf16=False),
    _DeviceRow("v100-32gb", 32, 900, 150, 16, "a100", "units", 125, 0, 15.7, bf16=False),
    _DeviceRow("v100-pcie-16gb", 16, 900, 16, 16, "a100", "units", 112, 0, 14, bf16=False),
    _DeviceRow("v100-pcie-32gb", 32, 900, 16, 16, "a100", "units", 112, 0, 14, bf16=False),
    _DeviceRow("t4", 16, 320, 16, 16, "a100", "power", 65, 0, 8.1, bf16=False),
    _DeviceRow("a10", 24, 600, 32, 32, "a100", "power", 125, 62.5, 31.2),
    _DeviceRow("a100-40gb", 40, 1555, 300, 32, "a100", "units", 312, 156, 19.5),
    _DeviceRow("a100-80gb", 80, 2039, 300, 32, "a100", "units", 312, 156, 19.5),
    _DeviceRow("a100-64gb", 64, 1640, 300, 32, "a100", "units", 354, 177, 22.1, node=4),
    _DeviceRow("a100-pcie-40gb", 40, 1555, 32, 32, "a100-pcie", "power", 312, 156, 19.5),
    _DeviceRow("a100-pcie-80gb", 80, 1935, 32, 32, "a100-pcie", "power", 312, 156, 19.5),
    _DeviceRow("a800-80gb", 80, 2039, 200, 32, "a100", "units", 312, 156, 19.5),
    _DeviceRow("l4", 24, 300, 32, 32, "a100", "power", 121, 60, 30.3, 242),
    _DeviceRow("l40s", 48, 864, 32, 32, "a100", "", 362, 183, 91.6, 733),
    _DeviceRow("rtx-3090", 24, 936, 32, 32, "a100", "", 71, 35.6, 35.6),
    _DeviceRow("rtx-4090", 24, 1008, 32, 32, "a100", "", 165.2, 82.6, 82.6, 330.3),
    _DeviceRow("h100-80gb", 80, 3350, 450, 64, "h100", "power", 989, 494, 67, 1979),
    _DeviceRow("h100-64gb", 64, 2020, 450, 64, "h100", "power", 891, 445, 56, 1782, node=4),
    _DeviceRow("h100-96gb", 96, 2400, 450, 64, "h100", "power", 880, 440, 60, 1761),
    _DeviceRow("h100-pcie", 80, 2000, 64, 64, "h100", "power", 756, 378, 51, 1513),
    _DeviceRow("h100-nvl", 94, 3900, 64, 64, "h100", "power", 835, 417, 60, 1671),
    _DeviceRow("h800", 80, 3350, 200, 64, "h100", "power", 989, 494, 67, 1979),
    _DeviceRow("h20", 96, 4000, 450, 64, "h20", "units", 148, 74, 44, 296),
    _DeviceRow("h200", 141, 4800, 450, 64, "h100", "power", 989, 494, 67, 1979),
    _DeviceRow("b200", 180, 8000, 900, 64, "b200", "power", 2250, 1100, 75, 4500, 9000),
    _DeviceRow("b300", 270, 8000, 900, 128, "b200", "power", 2250, 1125, 75, 4500, 13500),
    _DeviceRow("gb200", 186, 8000, 900, 225, "b200", "power", 2500, 1250, 80, 5000, 10000, node=72),
    _DeviceRow("gb300", 279, 8000, 900, 225, "b200", "power", 2500, 1250, 80, 5000, 15000, node=72),
    _DeviceRow("mi250x", 64, 1638, 50, 36, "mi250x", "power", 191.5, 0, 47.9),
    _DeviceRow("mi300x", 192, 5300, 448, 64, "mi300x", "power", 1307.4, 653.7, 163.4, 2614.9),
)
DEVICES: Mapping[str, Device] = MappingProxyType({row.name: row.device for row in _ALL})
"""Known devices by name. "h100-80gb" is the SXM part; V100 and A100 are SXM where no PCIe is said."""

LINK_BANDWIDTHS: Mapping[str, float] = MappingProxyType({row.name: row.link * 1e9 for row in _ALL})
"""By the names of DEVICES: bytes/s one way from one device to the others of its node, over NVLink, Infinity Fabric, or
PCIe with 16 lanes where there is neither. Between the GPUs of a ring of MI250X there is at least one link of 50e9.
"""

NODE_SIZES: Mapping[str, int] = MappingProxyType({row.name: row.node for row in _ALL})
"""By the names of DEVICES: how many devices reach each other over LINK_BANDWIDTHS in the machines that they are sold
in. In a rack of NVL72 these are all 72 devices of its 18 hosts.
"""

USUAL: Mapping[str, str] = MappingProxyType(
    {
        "v100": "v100-32gb",
        "v100-pcie": "v100-pcie-32gb",
        "a100": "a100-80gb",
        "a100-sxm": "a100-80gb",
        "a100-pcie": "a100-pcie-80gb",
        "a800": "a800-80gb",
        "h100": "h100-80gb",
        "h100-sxm": "h100-80gb",
    }
)
"""Names without a size, and the devices that they stand for: those with the most memory, but for H100 the usual one."""
