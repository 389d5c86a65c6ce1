"""Measured: the times that are measured on a machine, as values. Must not contain: how they are measured, or how a
cluster is fitted to them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

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


class SizeTime(NamedTuple):
    """Seconds that something of a size takes: bytes that are moved or sent, operations, or parameters."""

    size: float
    seconds: float


class LayerTime(NamedTuple):
    """Seconds of the forward and of the backward of one layer of a model."""

    model: GPT
    setup: Setup
    forward: float
    backward: float


class StepTime(NamedTuple):
    """Seconds of a step of a model without the optimizer, in which each rank of the schedule has its own device."""

    model: GPT
    setup: Setup
    schedule: Schedule
    seconds: float


class SumTime(NamedTuple):
    """Seconds in which a group sums `size` bytes."""

    group: RankGroup
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
        products: times at several sizes, as all that follow.
        copies, elementwise: of bytes of memory that are read and written, by a copy or by a layer's elementwise
            operations.
        attention: a third of the time of the FLOPs of attention's products, forward and backward.
        layers: of layers of a model.
        optimizer: of a step of AdamW on so many parameters, in float32.
        sums, gradient_sums: as a tensor-parallel layer sums, and as gradients are reduced.
        transfers, far_transfers: of bytes between two ranks, of one node or of two.
        steps: of whole models; none where the host runs ahead.
        forward_launch, backward_launch: seconds in which the host launches the forward and the backward of one layer.
        sync: seconds in which the host launches a collective, per other rank of its group.
        runs_ahead: whether the host launches while the device computes. If it does not, tensor sums are measured
            between computations, as the time that they add.
        sharing: ranks that share one processor.
        host: of bytes from a device to its host, while all ranks copy.
    """

    device: str
    memory_bytes: float
    devices_per_node: int
    precision: str
    products: tuple[ProductTime, ...]
    copies: tuple[SizeTime, ...]
    elementwise: tuple[SizeTime, ...]
    attention: tuple[SizeTime, ...]
    layers: tuple[LayerTime, ...]
    optimizer: tuple[SizeTime, ...]
    sums: tuple[SumTime, ...]
    gradient_sums: tuple[SumTime, ...]
    transfers: tuple[SizeTime, ...]
    far_transfers: tuple[SizeTime, ...]
    steps: tuple[StepTime, ...]
    forward_launch: float
    backward_launch: float
    sync: float
    sharing: float = 1.0
    runs_ahead: bool = True
    host: tuple[SizeTime, ...] = ()
