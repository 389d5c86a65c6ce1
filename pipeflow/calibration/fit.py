"""Fit: the cluster whose cost model gives back what was measured, as nearly as it can. Must not contain: measuring."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from statistics import fmean
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pipeflow.calibration.measured import Measured, ProductTime, SumTime
from pipeflow.planning.cluster import Cluster
from pipeflow.planning.device import Device
from pipeflow.planning.efficiency import Efficiency
from pipeflow.planning.rates import Rates
from pipeflow.planning.work import layer_work

Array = npt.NDArray[np.float64]
LONGEST = 1e4  # of a dimension at which products take twice as long
COMPUTED = ("products", "attention", "memory")  # the shares that times of computations depend on
LAUNCHES = 3.0  # so many times as long as its launch a layer takes at least in which computing counts
GRID, ZOOMS = 41, 8  # points of a search along each axis, and how often it is repeated around the best one


class Line(NamedTuple):
    """A time that grows with a size: `start` seconds, and one second for each `bandwidth`."""

    start: float
    bandwidth: float


def fitted(measured: Measured) -> Cluster:
    """The cluster. Its rates are the best that were measured, of which `efficiency` holds the shares that are reached.
    Products, attention and elementwise operations are then slowed down alike, by as much as whole layers take longer
    than their operations. Between nodes, a cluster has its usual network if only one node was measured.
    """
    flops = {
        precision: max(each.product.flops / each.seconds for each in measured.products if each.precision == precision)
        for precision in dict.fromkeys(each.precision for each in measured.products)
    }
    peak = flops[measured.precision]
    moved = [(each.of, each.size / each.seconds) for each in measured.moved]
    bandwidth = max(rate for _, rate in moved)
    large, depth, rows = product_coefficients(
        [each for each in measured.products if each.precision == measured.precision]
    )
    sums = line(_ring(each) for each in measured.sums if each.group.ranks == each.group.in_node)
    transfers = line((1.0, each.size, each.seconds) for each in measured.transfers if not each.crosses)
    best, latency = max(sums.bandwidth, transfers.bandwidth), min(sums.start, transfers.start)
    efficiency = {
        "products": large / peak,
        "depth": depth,
        "rows": rows,
        "attention": _typical(each.flops / each.seconds for each in measured.attention) / peak,
        "memory": _typical(rate for of, rate in moved if of == "layer") / bandwidth,
        "forward_launch": measured.forward_launch,
        "backward_launch": measured.backward_launch,
        "sync": measured.sync,
        "link": sums.bandwidth / best,
        "collective": sums.start - latency,
        "transfer": transfers.bandwidth / best,
        "transfer_start": transfers.start - latency,
    }
    network = _network(measured, efficiency)
    cluster = Cluster(
        Device(measured.device, flops, measured.memory_bytes, bandwidth),
        devices_per_node=measured.devices_per_node,
        link_bandwidth=best,
        link_latency=latency,
        **network,
        efficiency=efficiency,
        sharing=measured.sharing,
    )
    longer = layers_longer(measured, cluster)
    for name in COMPUTED:
        efficiency[name] /= longer
    return replace(cluster, efficiency=efficiency)


def layers_longer(measured: Measured, cluster: Cluster) -> float:
    """How many times as long whole layers take as `cluster` predicts from their operations, which were measured one by
    one: the geometric mean over those that take much longer than their launch; 1 if there are none.
    """
    rates = Rates(cluster, Efficiency.of(cluster.efficiency), measured.precision)
    found = []
    for each in measured.layers:
        computed = rates.seconds(layer_work(each.model, each.setup))
        if each.forward > LAUNCHES * measured.forward_launch and each.backward > LAUNCHES * measured.backward_launch:
            found.append((each.forward + each.backward) / (computed.forward + computed.backward))
    return _typical(found) if found else 1.0


def product_coefficients(times: Sequence[ProductTime]) -> tuple[float, float, float]:
    """The FLOP/s that large products approach, and the depth and the rows at which products take twice as long, for the
    least squares of the logarithms of predicted over measured times.
    """
    seconds = np.log([each.seconds / each.product.flops for each in times])
    shortest = np.array([min(each.product.columns, each.product.depth) for each in times])
    rows = np.array([each.product.rows for each in times])

    def errors(depth: Array, row: Array) -> Array:
        """Per pair of coefficients and time."""
        found: Array = seconds - np.log1p(depth[..., None] / shortest) - np.log1p(row[..., None] / rows)
        return found

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


def _ring(each: SumTime, ways: int = 1) -> tuple[float, float, float]:
    """A point of `line`: a sum starts once for each doubling of its group. By a ring, each rank sends as many bytes as
    this says, over as many `ways` as there are.
    """
    ranks = each.group.ranks
    return math.log2(ranks), 2 * (ranks - 1) / ranks * each.size / ways, each.seconds


def _network(measured: Measured, efficiency: dict[str, float]) -> dict[str, float]:
    """The network of the cluster. Adds the shares of it that are reached to `efficiency`."""
    sent = [(1.0, each.size, each.seconds) for each in measured.transfers if each.crosses]
    if not sent:
        return {}
    far = [each for each in measured.sums if each.group.ranks > each.group.in_node]
    transfers = line(sent)
    tensor, gradient = (
        line(_ring(each, each.group.in_node) for each in far if each.of == of) for of in ("tensor", "gradient")
    )
    best = max(transfers.bandwidth, tensor.bandwidth, gradient.bandwidth)
    efficiency["network"] = math.sqrt(transfers.bandwidth * tensor.bandwidth) / best
    efficiency["reduction"] = gradient.bandwidth / best
    return {"network_bandwidth": best, "network_latency": max(0.0, transfers.start - efficiency["transfer_start"])}


def _typical(rates: Iterable[float]) -> float:
    """The geometric mean."""
    return math.exp(fmean(map(math.log, rates)))
