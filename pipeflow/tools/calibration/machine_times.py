"""Measured: the times that are measured on a machine, as values. Must not contain: how they are measured, or how a
cluster is fitted to them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from pipeflow.core.schedule import Schedule
from pipeflow.planning.rates import RankGroup
from pipeflow.planning.setup import Setup
from pipeflow.planning.transformer import GPT
from pipeflow.planning.work import MatrixProduct


class ProductTime(NamedTuple):
    """Seconds of one product: the mean of the product in a forward and the two products in its backward."""

    precision: str
    product: MatrixProduct
    seconds: float


class MovedTime(NamedTuple):
    """Seconds in which `size` bytes of memory are read and written: by a "copy", or by the elementwise operations of a
    "layer".
    """

    of: Literal["copy", "layer"]
    size: float
    seconds: float


class AttentionTime(NamedTuple):
    """Seconds of attention's products: a third of the time of forward and backward together."""

    flops: float
    seconds: float


class LayerTime(NamedTuple):
    """Seconds of the forward and of the backward of one layer of a model."""

    model: GPT
    setup: Setup
    forward: float
    backward: float


class OptimizerTime(NamedTuple):
    """Seconds of a step of AdamW on so many parameters, in float32."""

    parameters: int
    seconds: float


class StepTime(NamedTuple):
    """Seconds of a step of a model without the optimizer, in which each rank of the schedule has its own device."""

    model: GPT
    setup: Setup
    schedule: Schedule
    seconds: float


class SumTime(NamedTuple):
    """Seconds in which a group sums `size` bytes: as a tensor-parallel layer does ("tensor"), or as gradients are
    reduced ("gradient").
    """

    of: Literal["tensor", "gradient"]
    group: RankGroup
    size: float
    seconds: float


class TransferTime(NamedTuple):
    """Seconds of a transfer of `size` bytes between two ranks, which lie in different nodes if it `crosses`."""

    crosses: bool
    size: float
    seconds: float


class HostTime(NamedTuple):
    """Seconds of a copy of `size` bytes from a device to its host, while all ranks copy."""

    size: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Measured:
    """All that is measured on a machine. Times are means over the ranks, which measure at once.

    Attributes:
        device: name of the device of a rank.
        memory_bytes: memory of one device.
        devices_per_node: ranks in each node.
        precision: the one that layers are measured in, whose products are fitted.
        products, moved, attention, layers, optimizer, sums, transfers, host: times at several sizes.
        steps: of whole models; none where the host runs ahead.
        forward_launch, backward_launch: seconds in which the host launches the forward and the backward of one layer.
        sync: seconds in which the host launches a collective, per other rank of its group.
        runs_ahead: whether the host launches while the device computes. If it does not, tensor sums are measured
            between computations, as the time that they add.
        sharing: ranks that share one processor.
    """

    device: str
    memory_bytes: float
    devices_per_node: int
    precision: str
    products: tuple[ProductTime, ...]
    moved: tuple[MovedTime, ...]
    attention: tuple[AttentionTime, ...]
    layers: tuple[LayerTime, ...]
    optimizer: tuple[OptimizerTime, ...]
    sums: tuple[SumTime, ...]
    transfers: tuple[TransferTime, ...]
    steps: tuple[StepTime, ...]
    forward_launch: float
    backward_launch: float
    sync: float
    sharing: float = 1.0
    runs_ahead: bool = True
    host: tuple[HostTime, ...] = ()
