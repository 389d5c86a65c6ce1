"""Errors: how far the times of a cluster's cost model are from the measured times. Must not contain: the fit."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import fmean
from typing import NamedTuple

from pipeflow.planning.cluster import Cluster
from pipeflow.planning.efficiency import Efficiency
from pipeflow.planning.layer_seconds import layer_times
from pipeflow.planning.rates import Rates
from pipeflow.planning.work import layer_work
from pipeflow.tools.calibration.fit import OPTIMIZED, step_seconds
from pipeflow.tools.calibration.machine_times import Measured


class TimePair(NamedTuple):
    """A predicted and a measured time of one kind, in seconds."""

    kind: str
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """The difference, as a share of the measured time."""
        return abs(self.predicted / self.measured - 1)


def pairs(measured: Measured, cluster: Cluster) -> Iterator[TimePair]:
    """Yields every measured time together with the time that the cost model predicts for `cluster`."""
    known = Efficiency.of(cluster.efficiency)
    rates = Rates(cluster, known, measured.precision)
    for each in measured.products:
        seconds = Rates(cluster, known, each.precision).product(each.product)
        yield TimePair(f"products in {each.precision}", seconds, each.seconds)
    for moving in measured.moved:
        if moving.of == "layer":
            yield TimePair("elementwise", rates.moving(moving.size), moving.seconds)
    for attended in measured.attention:
        yield TimePair("attention", attended.flops / rates.attention(None)[0], attended.seconds)
    for layer in measured.layers:
        forward, backward, _ = layer_times(rates.seconds(layer_work(layer.model, layer.setup)), rates, "none")
        yield TimePair("layers, forward", forward, layer.forward)
        yield TimePair("layers, backward", backward, layer.backward)
    for step in measured.optimizer:
        yield TimePair("optimizer", rates.stepping(OPTIMIZED * step.parameters), step.seconds)
    for whole in measured.steps:
        yield TimePair("steps", step_seconds(whole, cluster), whole.seconds)
    for summed in measured.sums:
        crosses = summed.group.ranks > summed.group.in_node
        predict = rates.gradient_sum if summed.of == "gradient" else rates.tensor_sum
        kind = {"tensor": "sums", "gradient": "gradient sums"}[summed.of] + " between nodes" * crosses
        yield TimePair(kind, predict(summed.group, summed.size), summed.seconds)
    near = cluster.link_bandwidth * known.transfer
    for sent in measured.transfers:
        bandwidth = min(cluster.network_bandwidth * known.network, near) if sent.crosses else near
        latency = cluster.network_latency if sent.crosses else cluster.link_latency
        seconds = known.transfer_start + latency + sent.size / bandwidth
        yield TimePair("transfers" + " between nodes" * sent.crosses, seconds, sent.seconds)


def mean_errors(measured: Measured, cluster: Cluster) -> dict[str, tuple[float, int]]:
    """Per kind, the mean error as a share of the measured times, and the number of these times."""
    errors: dict[str, list[float]] = {}
    for pair in pairs(measured, cluster):
        errors.setdefault(pair.kind, []).append(pair.error)
    return {kind: (fmean(each), len(each)) for kind, each in errors.items()}
