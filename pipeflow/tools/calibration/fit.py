"""Fit: the cluster whose cost model is closest to the measured times, and how far it is from them. Must not contain:
measuring.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import combinations
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pipeflow.planning.cluster import NETWORK_BANDWIDTH, Cluster, ShapeTime
from pipeflow.planning.device import Device
from pipeflow.planning.efficiency import Efficiency
from pipeflow.planning.estimate import plan
from pipeflow.planning.layer_seconds import layer_times
from pipeflow.planning.rates import Rates
from pipeflow.planning.work import layer_work
from pipeflow.tools.calibration.machine_times import Measured, ProductTime, SizeTime, StepTime, SumTime

Array = npt.NDArray[np.float64]
LONGEST = 1e4  # of a dimension at which products take twice as long
COMPUTED = ("products", "attention", "memory")  # the shares that times of computations depend on
BACKWARD = 2.0  # times the forward's computations, unless layers say otherwise
OPTIMIZED = 2 * 8 + 3 * 4 + 4  # bytes that a step of AdamW moves per parameter in float32, as plans count them
LAUNCHES = 3.0  # so many times as long as its launch a layer takes at least in which computing counts
GRID, ZOOMS = 41, 8  # points of a search along each axis, and how often it is repeated around the best one


class Line(NamedTuple):
    """A time that grows with a size: `start` seconds, and one second for each `bandwidth`."""

    start: float
    bandwidth: float


def fitted(measured: Measured) -> Cluster:
    """Fits a cluster to the measurements. Its rates are the best measured ones, and `efficiency` has the shares of them
    that are reached. The shares of products, attention and elementwise operations are then lowered by one factor,
    because whole layers take longer than their operations, and whole steps longer than their layers. If only one node
    was measured, the network between nodes is the usual one. If only one device was measured, it is a node.
    """
    cluster = _of_operations(measured)
    cluster = replace(cluster, shapes=tuple(_shapes(measured, cluster)))
    efficiency = dict(cluster.efficiency)
    launch, forward, backward = layers_longer(measured, cluster)
    for name in COMPUTED:
        efficiency[name] /= forward
    efficiency |= {"forward_launch": launch[0], "backward_launch": launch[1], "backward": backward / forward}
    longer = steps_longer(measured, replace(cluster, efficiency=efficiency))
    for name in COMPUTED:
        efficiency[name] /= longer
    for name in ("forward_launch", "backward_launch"):
        efficiency[name] *= longer
    return replace(cluster, efficiency=efficiency)


def _of_operations(measured: Measured) -> Cluster:
    """The cluster as its operations tell, measured one by one."""
    flops = {
        precision: max(each.product.flops / each.seconds for each in measured.products if each.precision == precision)
        for precision in dict.fromkeys(each.precision for each in measured.products)
    }
    peak = flops[measured.precision]
    bandwidth = max(_rates((*measured.copies, *measured.elementwise)))
    large, depth, rows = product_coefficients(
        [each for each in measured.products if each.precision == measured.precision]
    )
    efficiency = {
        "products": large / peak,
        "depth": depth,
        "rows": rows,
        "attention": _typical(_rates(measured.attention)) / peak,
        "memory": _typical(_rates(measured.elementwise)) / bandwidth,
        "forward_launch": measured.forward_launch,
        "backward_launch": measured.backward_launch,
        "optimizer": OPTIMIZED * _typical(_rates(measured.optimizer)) / bandwidth,
    }
    return Cluster(
        Device(
            measured.device,
            flops,
            measured.memory_bytes,
            bandwidth,
            measured.runs_ahead,
            host_bandwidth=max(_rates(measured.host), default=0.0),
        ),
        devices_per_node=measured.devices_per_node,
        devices_per_nic=1,
        **_links(measured, efficiency),
        **_network(measured, efficiency),
        efficiency=efficiency,
        sharing=measured.sharing,
    )


def _shapes(measured: Measured, cluster: Cluster) -> Iterator[ShapeTime]:
    """How many times as long products of each shape took as the coefficients of the cluster say."""
    rates = Rates(cluster, Efficiency.of(cluster.efficiency), measured.precision)
    found: dict[tuple[float, float], list[float]] = {}
    for each in measured.products:
        if each.precision == measured.precision:
            product = each.product
            shape = product.rows, min(product.columns, product.depth)
            found.setdefault(shape, []).append(each.seconds / rates.product(product))
    for (rows, shortest), times in sorted(found.items()):
        yield ShapeTime(rows, shortest, _typical(times))


def steps_longer(measured: Measured, cluster: Cluster) -> float:
    """The time of whole steps relative to the prediction of `cluster` from their layers, as a geometric mean. 1 if no
    step was measured.
    """
    return _typical(each.seconds / step_seconds(each, cluster) for each in measured.steps) if measured.steps else 1.0


def step_seconds(step: StepTime, cluster: Cluster) -> float:
    """The time of a step, without the optimizer, as planned."""
    parts = plan(step.model, step.schedule, step.setup, cluster=cluster).step_parts
    assert parts is not None  # there is a cluster
    return sum(parts) - parts.optimizer


def layers_longer(measured: Measured, cluster: Cluster) -> tuple[tuple[float, float], float, float]:
    """The time of whole layers in addition to their operations, which were measured one by one. Returns the seconds to
    launch their forward and their backward. Also returns how many times as long they compute as `cluster` predicts for
    a forward, or for half of a backward.

    If the host runs ahead, launches were measured by themselves, and the rest is the geometric mean over the layers
    that take much longer than their launch. Otherwise each of the two times is fitted by a line: the launch is its
    start, and the operations are its slope.
    """
    rates = Rates(cluster, Efficiency.of(cluster.efficiency), measured.precision)
    works = [layer_work(each.model, each.setup) for each in measured.layers]
    known = [rates.seconds(work._replace(added_bytes=0.0)) for work in works]
    added = [rates.moving(work.added_bytes) for work in works]  # which takes as long whatever products take
    forward = [(1.0, one.forward, each.forward) for one, each in zip(known, measured.layers, strict=True)]
    backward = [
        (1.0, one.backward / BACKWARD, each.backward - adding)
        for one, each, adding in zip(known, measured.layers, added, strict=True)
    ]
    launch = measured.forward_launch, measured.backward_launch
    if not measured.runs_ahead:
        lines = line(forward), line(backward)
        return (lines[0].start, lines[1].start), 1 / lines[0].bandwidth, 1 / lines[1].bandwidth
    long = [
        (ahead[2] / ahead[1], back[2] / back[1])
        for ahead, back in zip(forward, backward, strict=True)
        if ahead[2] > LAUNCHES * launch[0] and back[2] > LAUNCHES * launch[1]
    ]
    if not long:
        return launch, 1.0, BACKWARD
    return launch, _typical(each[0] for each in long), _typical(each[1] for each in long)


def _links(measured: Measured, efficiency: dict[str, float]) -> dict[str, Any]:
    """The links of the cluster inside a node. Adds the shares of them that are reached to `efficiency`. A device that
    was measured alone has none: others are across the network.
    """
    if not measured.transfers:
        return {"link_bandwidth": NETWORK_BANDWIDTH}
    sums, others = _sums(measured)
    gradients = line(_ring(each) for each in measured.gradient_sums if _is_near(each))
    transfers = line((1.0, *each) for each in measured.transfers)
    best = max(sums.bandwidth, gradients.bandwidth, transfers.bandwidth)
    latency = min(others / 2, transfers.start)  # a sum goes around twice
    efficiency |= {
        "sync": measured.sync if measured.runs_ahead else others - 2 * latency,
        "link": sums.bandwidth / best,
        "collective": sums.start,
        "transfer": transfers.bandwidth / best,
        "transfer_start": transfers.start - latency,
        "gradients": gradients.bandwidth / best,
    }
    return {"link_bandwidth": best, "link_latency": latency}


def _sums(measured: Measured) -> tuple[Line, float]:
    """The line of tensor sums in a node, and the seconds that each other rank of the group adds to a sum."""
    near = [each for each in measured.sums if _is_near(each)]
    rows = [(start, each.group.ranks - 1, size, seconds) for each in near for start, size, seconds in [_ring(each)]]
    start, others, slope = nonnegative(rows)
    return Line(start, 1 / slope if slope else max(each[2] / each[3] for each in rows)), others


def _is_near(each: SumTime) -> bool:
    return each.group.ranks == each.group.in_node


def product_coefficients(times: Sequence[ProductTime]) -> tuple[float, float, float]:
    """The FLOP/s that large products approach, and the depth and the rows at which products take twice as long. They
    minimize the squares of the logarithms of predicted over measured times.
    """
    seconds = np.log([each.seconds / each.product.flops for each in times])
    shortest = np.array([min(each.product.columns, each.product.depth) for each in times])
    rows = np.array([each.product.rows for each in times])

    def errors(depth: Array, row: Array) -> Array:
        """The errors, one for each pair of coefficients and each time."""
        found: Array = seconds - np.log1p(depth[..., None] / shortest + row[..., None] / rows)
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
    """The line for points (scale, size, seconds), which predicts a time as start * scale + size / bandwidth. It
    minimizes the squares of relative errors, and neither start nor 1 / bandwidth is negative.
    """
    known = list(points)
    start, slope = nonnegative(known)
    return Line(start, 1 / slope if slope else max(size / seconds for _, size, seconds in known))


def nonnegative(rows: Sequence[tuple[float, ...]]) -> tuple[float, ...]:
    """Non-negative factors for rows (x, y, ..., seconds), which predict a time as x times the first factor plus y times
    the second and so on. They minimize the squares of relative errors.
    """
    known = np.array(rows)
    scaled = known[:, :-1] / known[:, -1:]
    columns = range(scaled.shape[1])
    found: list[tuple[float, Array]] = []
    for chosen in (list(each) for many in columns for each in combinations(columns, many + 1)):
        solved = np.zeros(len(columns))
        solved[chosen] = np.linalg.lstsq(scaled[:, chosen], np.ones(len(known)), rcond=None)[0]
        if (solved >= 0).all():
            found.append((float(((scaled @ solved - 1) ** 2).sum()), solved))
    return tuple(map(float, min(found, key=lambda each: each[0])[1]))


def _ring(each: SumTime, ways: int = 1) -> tuple[float, float, float]:
    """A point of `line`. Its size is the number of bytes that each rank sends in a ring, divided by the number of
    `ways`.
    """
    ranks = each.group.ranks
    return 1.0, 2 * (ranks - 1) / ranks * each.size / ways, each.seconds


def _network(measured: Measured, efficiency: dict[str, float]) -> dict[str, Any]:
    """The network of the cluster. Adds the shares of it that are reached to `efficiency`."""
    if not measured.far_transfers:
        return {}
    transfers = line((1.0, *each) for each in measured.far_transfers)
    tensor, gradient = (
        line(_ring(each, each.group.in_node) for each in times if not _is_near(each))
        for times in (measured.sums, measured.gradient_sums)
    )
    best = max(transfers.bandwidth, tensor.bandwidth, gradient.bandwidth)
    efficiency["network"] = math.sqrt(transfers.bandwidth * tensor.bandwidth) / best
    efficiency["reduction"] = gradient.bandwidth / best
    return {"network_bandwidth": best, "network_latency": max(0.0, transfers.start - efficiency["transfer_start"])}


def _rates(times: Iterable[SizeTime]) -> Iterator[float]:
    return (each.size / each.seconds for each in times)


def _typical(rates: Iterable[float]) -> float:
    """The geometric mean of `rates`."""
    return math.exp(fmean(map(math.log, rates)))


def mean_errors(measured: Measured, cluster: Cluster) -> dict[str, tuple[float, int]]:
    """Per kind of measured time, the mean error of what the cost model predicts for `cluster`, as a share of the
    measured times, and the number of these times.
    """
    errors: dict[str, list[float]] = {}
    for kind, predicted, seconds in _predictions(measured, cluster):
        errors.setdefault(kind, []).append(abs(predicted / seconds - 1))
    return {kind: (fmean(each), len(each)) for kind, each in errors.items()}


def _predictions(measured: Measured, cluster: Cluster) -> Iterator[tuple[str, float, float]]:
    """For each measured time its kind, what the cost model predicts, and the time itself."""
    known = Efficiency.of(cluster.efficiency)
    rates = Rates(cluster, known, measured.precision)
    for precision, product, seconds in measured.products:
        yield f"products in {precision}", Rates(cluster, known, precision).product(product), seconds
    for size, seconds in measured.elementwise:
        yield "elementwise", rates.moving(size), seconds
    for flops, seconds in measured.attention:
        yield "attention", flops / rates.attention(None)[0], seconds
    for layer in measured.layers:
        forward, backward, _ = layer_times(rates.seconds(layer_work(layer.model, layer.setup)), rates, "none")
        yield "layers, forward", forward, layer.forward
        yield "layers, backward", backward, layer.backward
    for parameters, seconds in measured.optimizer:
        yield "optimizer", rates.stepping(OPTIMIZED * parameters), seconds
    for step in measured.steps:
        yield "steps", step_seconds(step, cluster), step.seconds
    sums = (
        ("sums", measured.sums, rates.tensor_sum),
        ("gradient sums", measured.gradient_sums, rates.gradient_sum),
    )
    for kind, times, predict in sums:
        for each in times:
            yield kind if _is_near(each) else f"{kind} between nodes", predict(each.group, each.size), each.seconds
    near = cluster.link_bandwidth * known.transfer
    far = min(cluster.network_bandwidth * known.network, near)
    for size, seconds in measured.transfers:
        yield "transfers", known.transfer_start + cluster.link_latency + size / near, seconds
    for size, seconds in measured.far_transfers:
        yield "transfers between nodes", known.transfer_start + cluster.network_latency + size / far, seconds
