"""Fit: the cluster whose cost model gives back what was measured, as nearly as it can. Must not contain: measuring."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pipeflow.calibration.measured import Measured, ProductTime, SumTime, TransferTime
from pipeflow.planning.cluster import Cluster
from pipeflow.planning.device import Device

Array = npt.NDArray[np.float64]
LONGEST = 1e4  # of a dimension at which products take twice as long
GRID, ZOOMS = 41, 8  # points of a search along each axis, and how often it is repeated around the best one


class Line(NamedTuple):
    """A time that grows with a size: `start` seconds, and one second for each `bandwidth`."""

    start: float
    bandwidth: float


@dataclass(frozen=True, slots=True)
class Links:
    """What was fitted to the links of one kind, inside a node or between nodes.

    Attributes:
        sums: of collectives: `start` per doubling of the group.
        transfers: of transfers between stages.
        best: the highest bandwidth measured.
    """

    sums: Line
    transfers: Line
    best: float


def fitted(measured: Measured) -> Cluster:
    """The cluster. Its rates are the best that were measured, of which `efficiency` holds the shares that are reached.
    Between nodes, a cluster has its usual network if only one node was measured.
    """
    flops = {
        precision: max(each.product.flops / each.seconds for each in measured.products if each.precision == precision)
        for precision in dict.fromkeys(each.precision for each in measured.products)
    }
    peak = flops[measured.precision]
    moved = [(each.of, each.count / each.seconds) for each in measured.moved]
    bandwidth = max(rate for _, rate in moved)
    large, depth, rows = product_coefficients(
        [each for each in measured.products if each.precision == measured.precision]
    )
    near = _links(
        [each for each in measured.sums if each.group.ranks == each.group.in_node],
        [each for each in measured.transfers if not each.crosses],
    )
    latency = min(near.sums.start, near.transfers.start)
    efficiency = {
        "products": large / peak,
        "depth": depth,
        "rows": rows,
        "attention": _typical(each.flops / each.seconds for each in measured.attention) / peak,
        "memory": _typical(rate for of, rate in moved if of == "layer") / bandwidth,
        "forward_launch": measured.forward_launch,
        "backward_launch": measured.backward_launch,
        "sync": measured.sync,
        "link": near.sums.bandwidth / near.best,
        "collective": near.sums.start - latency,
        "transfer": near.transfers.bandwidth / near.best,
        "transfer_start": near.transfers.start - latency,
    }
    network = _network(measured, efficiency)
    return Cluster(
        Device(measured.device, flops, measured.memory_bytes, bandwidth),
        devices_per_node=measured.devices_per_node,
        link_bandwidth=near.best,
        link_latency=latency,
        **network,
        efficiency=efficiency,
    )


def product_coefficients(times: Sequence[ProductTime]) -> tuple[float, float, float]:
    """The FLOP/s that large products approach, and the depth and the rows at which products take twice as long, for the
    least squares of the logarithms of predicted over measured times.
    """
    seconds = np.log([each.seconds / each.product.flops for each in times])
    shortest = np.array([min(each.product.columns, each.product.depth) for each in times])
    rows = np.array([each.product.rows for each in times])

    def errors(depth: Array, row: Array) -> Array:
        """Per pair of coefficients and time."""
        return seconds - np.log1p(depth[..., None] / shortest) - np.log1p(row[..., None] / rows)

    low, high = np.full(2, -1.0), np.full(2, math.log1p(LONGEST))
    best = np.zeros(2)
    for _ in range(ZOOMS):
        axes = [np.expm1(np.clip(np.linspace(*ends, GRID), 0, None)) for ends in zip(low, high, strict=True)]
        grid = np.stack(np.meshgrid(*axes, indexing="ij"))
        index = np.unravel_index(errors(*grid).var(axis=-1).argmin(), grid.shape[1:])
        best = grid[:, *index]
        width = 2 * (high - low) / (GRID - 1)
        low, high = np.log1p(best) - width, np.log1p(best) + width
    large = math.exp(-float(errors(*best).mean()))
    return large, float(best[0]), float(best[1])


def line(points: Iterable[tuple[float, float, float]]) -> Line:
    """The line for points (scale, size, seconds), where a time is predicted as start * scale + size / bandwidth: the
    least squares of relative errors, with neither of the two negative.
    """
    known = np.array(list(points))
    scaled = known[:, :2] / known[:, 2:]
    choices = [[0, 1], [0], [1]]
    found: list[tuple[float, Array]] = []
    for chosen in choices:
        solved = np.zeros(2)
        solved[chosen] = np.linalg.lstsq(scaled[:, chosen], np.ones(len(known)), rcond=None)[0]
        if (solved >= 0).all():
            found.append((float(((scaled @ solved - 1) ** 2).sum()), solved))
    start, slope = min(found, key=lambda each: each[0])[1]
    return Line(float(start), 1 / float(slope) if slope else float((known[:, 1] / known[:, 2]).max()))


def _links(sums: Sequence[SumTime], transfers: Sequence[TransferTime]) -> Links:
    ring = [(math.log2(each.group.ranks), _passed(each), each.seconds) for each in sums]
    sent = [(1.0, float(each.count), each.seconds) for each in transfers]
    return Links(line(ring), line(sent), max(size / seconds for _, size, seconds in (*ring, *sent)))


def _passed(each: SumTime) -> float:
    """The bytes that a rank sends, and as many that it receives, in a sum by a ring."""
    return 2 * (each.group.ranks - 1) / each.group.ranks * each.count


def _network(measured: Measured, efficiency: dict[str, float]) -> dict[str, float]:
    """The network of the cluster. Adds the shares of it that are reached to `efficiency`."""
    transfers = [each for each in measured.transfers if each.crosses]
    if not transfers:
        return {}
    sums: dict[str, list[tuple[float, float, float]]] = {"tensor": [], "gradient": []}
    for each in measured.sums:
        if each.group.ranks > each.group.in_node:
            size = _passed(each) / each.group.in_node  # of one device
            sums[each.of].append((math.log2(each.group.ranks), size, each.seconds))
    sent = [(1.0, float(each.count), each.seconds) for each in transfers]
    best = max(size / seconds for _, size, seconds in (*sent, *sums["tensor"], *sums["gradient"]))
    path, tensor = line(sent), line(sums["tensor"])
    efficiency["network"] = math.sqrt(path.bandwidth * tensor.bandwidth) / best
    efficiency["reduction"] = line(sums["gradient"]).bandwidth / best
    return {"network_bandwidth": best, "network_latency": max(0.0, path.start - efficiency["transfer_start"])}


def _typical(rates: Iterable[float]) -> float:
    """The geometric mean."""
    return math.exp(fmean(map(math.log, rates)))
