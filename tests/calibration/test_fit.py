"""The fit gives back the coefficients under which synthetic times were made, and so the times."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pipeflow.planning.cluster import Cluster
from pipeflow.planning.device import Device
from pipeflow.planning.efficiency import Efficiency
from pipeflow.planning.layer_seconds import layer_times
from pipeflow.planning.rates import RankGroup, Rates
from pipeflow.planning.setup import Setup
from pipeflow.planning.transformer import GPT
from pipeflow.planning.work import layer_work
from pipeflow.schedules import make_schedule
from pipeflow.tools.calibration.computing import ATTENTIONS, PRODUCTS, sized
from pipeflow.tools.calibration.fit import (
    OPTIMIZED,
    fitted,
    line,
    mean_errors,
    nonnegative,
    product_coefficients,
    step_seconds,
)
from pipeflow.tools.calibration.machine_times import LayerTime, Measured, ProductTime, SizeTime, StepTime, SumTime

DEVICE = Device(
    "some device", {"bf16": 200e12, "float32": 20e12}, memory_bytes=64e9, memory_bandwidth=1e12, host_bandwidth=2e10
)
KNOWN = {
    "products": 0.9,
    "depth": 120.0,
    "rows": 40.0,
    "attention": 0.4,
    "memory": 0.7,
    "forward_launch": 1e-3,
    "backward_launch": 5e-4,
    "sync": 1e-5,
    "link": 0.8,
    "collective": 5e-5,
    "transfer": 1.0,
    "transfer_start": 0.0,
    "backward": 1.8,
    "gradients": 0.6,
    "optimizer": 0.3,
}
NEAR = Cluster(DEVICE, devices_per_node=4, link_bandwidth=1e11, link_latency=2e-5, efficiency=KNOWN)
FAR = replace(
    NEAR,
    network_bandwidth=1e10,
    network_latency=3e-5,
    efficiency={**KNOWN, "network": 1.0, "reduction": 0.5},
)
CPU = replace(NEAR, device=replace(DEVICE, runs_ahead=False), sharing=2.0)
STEP = make_schedule("1f1b", ranks=4, microbatches=8)
SIZES = [2.0**exponent for exponent in (12, 16, 20, 24, 26)]


def rates(cluster: Cluster, precision: str = "bf16") -> Rates:
    return Rates(cluster, Efficiency.of(cluster.efficiency), precision)


def measured(cluster: Cluster) -> Measured:
    """What a machine that is as `cluster` says would measure."""
    known, main = cluster.efficiency, rates(cluster)
    is_far = cluster is FAR
    groups = [RankGroup(2, 2), RankGroup(4, 4), *[RankGroup(8, 4)] * is_far]
    gradient_groups = [RankGroup(4, 4), *[RankGroup(2, 1)] * is_far]
    near = cluster.link_bandwidth * known["transfer"]
    works = [layer_work(*sized(*size, "bf16")) for size in ATTENTIONS]

    def sent(latency: float, bandwidth: float) -> tuple[SizeTime, ...]:
        return tuple(SizeTime(size, known["transfer_start"] + latency + size / bandwidth) for size in SIZES)

    peak = cluster.device.flops["bf16"]
    return Measured(
        device="some device",
        memory_bytes=64e9,
        devices_per_node=4,
        precision="bf16",
        products=tuple(
            ProductTime(name, each, rates(cluster, name).product(each)) for name in DEVICE.flops for each in PRODUCTS
        ),
        copies=tuple(SizeTime(size, size / 1e12) for size in SIZES),
        elementwise=tuple(SizeTime(size, size / (1e12 * known["memory"])) for size in SIZES),
        attention=tuple(
            SizeTime(work.attention_flops, work.attention_flops / (peak * known["attention"])) for work in works
        ),
        layers=tuple(
            LayerTime(*sized(*size, "bf16"), *layer_times(main.seconds(work), main, "none")[:2])
            for size, work in zip(ATTENTIONS, works, strict=True)
        ),
        optimizer=tuple(SizeTime(count, main.stepping(OPTIMIZED * count)) for count in (10**6, 10**7)),
        sums=tuple(SumTime(group, size, main.tensor_sum(group, size)) for group in groups for size in SIZES),
        gradient_sums=tuple(
            SumTime(group, size, main.gradient_sum(group, size)) for group in gradient_groups for size in SIZES
        ),
        transfers=sent(cluster.link_latency, near),
        far_transfers=sent(cluster.network_latency, min(near, cluster.network_bandwidth * known["network"]))
        if is_far
        else (),
        steps=tuple(_step(cluster, hidden) for hidden in (256, 512) if not cluster.device.runs_ahead),
        forward_launch=known["forward_launch"],
        backward_launch=known["backward_launch"],
        sync=known["sync"],
        sharing=cluster.sharing,
        runs_ahead=cluster.device.runs_ahead,
        host=tuple(SizeTime(size, 1e-5 + size / 2e10) for size in (2**20, 2**30)),
    )


def _step(cluster: Cluster, hidden: int) -> StepTime:
    step = StepTime(GPT(8, hidden, hidden // 64, 512), Setup(), STEP, 0.0)
    return step._replace(seconds=step_seconds(step, cluster))


@pytest.mark.parametrize("cluster", [NEAR, FAR, CPU], ids=["one node", "several nodes", "CPU"])
def test_known_coefficients_are_found(cluster: Cluster) -> None:
    """The peak is the best rate that was measured, which large products do not reach; all else is as it was."""
    times = measured(cluster)
    found = fitted(times)
    peak = max(each.product.flops / each.seconds for each in times.products if each.precision == "bf16")
    assert found.device.flops["bf16"] == peak < DEVICE.flops["bf16"]
    rescaled = DEVICE.flops["bf16"] / peak
    expected = {**cluster.efficiency, "products": 0.9 * rescaled, "attention": 0.4 * rescaled}
    assert found.efficiency == pytest.approx(expected, rel=1e-3, abs=1e-9)
    for name in ("link_bandwidth", "link_latency", "network_bandwidth", "network_latency", "devices_per_node"):
        assert getattr(found, name) == pytest.approx(getattr(cluster, name), rel=1e-3), name
    assert (found.device.runs_ahead, found.sharing) == (cluster.device.runs_ahead, cluster.sharing)
    assert found.device.memory_bandwidth == pytest.approx(1e12)
    assert found.device.host_bandwidth == pytest.approx(2e10, rel=0.001)


def test_a_device_that_is_alone_has_no_links() -> None:
    """Others are across a usual network, of which no coefficients are made up; the rest is as with links."""
    times = measured(NEAR)
    whole, alone = (
        fitted(times),
        fitted(replace(times, sums=(), gradient_sums=(), transfers=(), sync=0.0, devices_per_node=1)),
    )
    links = {"sync", "link", "collective", "transfer", "transfer_start", "gradients"}
    assert alone.efficiency == {name: value for name, value in whole.efficiency.items() if name not in links}
    assert (alone.devices_per_node, alone.link_bandwidth, alone.network_bandwidth) == (1, 25e9, 25e9)
    assert (alone.device, alone.shapes) == (whole.device, whole.shapes)


@pytest.mark.parametrize("cluster", [NEAR, FAR, CPU], ids=["one node", "several nodes", "CPU"])
def test_the_times_are_given_back(cluster: Cluster) -> None:
    times = measured(cluster)
    errors = mean_errors(times, fitted(times))
    assert {kind for kind in errors if "between nodes" in kind} == (
        {"sums between nodes", "gradient sums between nodes", "transfers between nodes"} if cluster is FAR else set()
    )
    assert all(error < 1e-3 for error, _ in errors.values()), errors
    assert errors["transfers"][1] == len(SIZES)


def test_layers_that_take_longer_than_their_operations_slow_them_all_down() -> None:
    times = measured(NEAR)
    plain = fitted(times).efficiency
    late = tuple(each._replace(forward=1.2 * each.forward, backward=1.2 * each.backward) for each in times.layers)
    slower = fitted(replace(times, layers=late))
    expected = {name: plain[name] / 1.2 for name in ("products", "attention", "memory")}
    assert slower.efficiency == pytest.approx(
        {**plain, **expected}, rel=0.02, abs=1e-9
    )  # memory adds up gradients, too
    before, errors = (mean_errors(replace(times, layers=late), cluster) for cluster in (fitted(times), slower))
    assert errors["layers, backward"][0] < before["layers, backward"][0]
    assert errors["products in bf16"][0] == pytest.approx(0.2, rel=1e-3)


def test_steps_that_take_longer_than_their_layers_slow_these_down() -> None:
    times = measured(CPU)
    plain = fitted(times).efficiency
    late = tuple(each._replace(seconds=1.3 * each.seconds) for each in times.steps)
    slower = fitted(replace(times, steps=late))
    rates = {name: plain[name] / slower.efficiency[name] for name in ("products", "attention", "memory")}
    assert rates == pytest.approx(dict.fromkeys(rates, rates["products"]))
    assert 1.2 < rates["products"] < 1.3 + 1e-6  # transfers are as fast as before
    assert slower.efficiency["forward_launch"] == pytest.approx(plain["forward_launch"] * rates["products"])
    assert mean_errors(replace(times, steps=late), slower)["steps"][0] < 0.1


def test_layers_that_are_launched_longer_than_they_compute_do_not_count() -> None:
    times = measured(NEAR)
    tiny = tuple(each._replace(forward=2e-3, backward=1e-3) for each in times.layers)
    assert fitted(replace(times, layers=tiny)).efficiency == pytest.approx(fitted(replace(times, layers=())).efficiency)


def test_an_error_is_a_share_of_the_measured_time() -> None:
    times = measured(NEAR)
    cluster = fitted(times)
    slower = replace(times, transfers=tuple(each._replace(seconds=2 * each.seconds) for each in times.transfers))
    assert mean_errors(slower, cluster)["transfers"][0] == pytest.approx(0.5)


@pytest.mark.parametrize(("depth", "rows"), [(0.0, 0.0), (120.0, 0.0), (0.0, 40.0), (900.0, 300.0)])
def test_products(depth: float, rows: float) -> None:
    cluster = replace(NEAR, efficiency={**KNOWN, "depth": depth, "rows": rows})
    times = [ProductTime("bf16", each, rates(cluster).product(each)) for each in PRODUCTS]
    assert product_coefficients(times) == pytest.approx((0.9 * 200e12, depth, rows), rel=1e-3, abs=0.2)


def test_shapes_that_take_longer_than_the_coefficients_say_are_kept() -> None:
    slow = PRODUCTS[len(PRODUCTS) // 2]
    times = measured(NEAR)
    late = [each._replace(seconds=1.5 * each.seconds) if each.product == slow else each for each in times.products]
    plain, cluster = fitted(times), fitted(replace(times, products=tuple(late)))
    assert all(each.longer == pytest.approx(1.0, abs=0.01) for each in plain.shapes)
    longest = max(cluster.shapes, key=lambda each: each.longer)
    assert (longest.rows, longest.shortest) == (slow.rows, min(slow.columns, slow.depth))
    assert longest.longer > 1.1


def test_a_few_wrong_times_move_the_fit_a_little() -> None:
    times = [ProductTime("bf16", each, rates(NEAR).product(each)) for each in PRODUCTS]
    times[::10] = [each._replace(seconds=1.2 * each.seconds) for each in times[::10]]
    large, _, _ = product_coefficients(times)
    assert large == pytest.approx(0.9 * 200e12, rel=0.1)


def test_a_line() -> None:
    points = [(scale, size, 2e-5 * scale + size / 1e9) for scale, size in ((1.0, 1e3), (2.0, 1e6), (1.0, 1e7))]
    assert line(points) == pytest.approx((2e-5, 1e9))


def test_neither_end_of_a_line_is_negative() -> None:
    falling = [(1.0, 1e3, 2e-3), (1.0, 1e6, 1e-3)]
    assert line(falling) == pytest.approx((1.2e-3, 1e9))  # the start that is nearest to both, by relative errors
    through = [(1.0, 1e6, 1e-3), (1.0, 1e7, 2e-2)]
    assert line(through).start == 0


def test_factors_of_several_terms_of_which_none_is_negative() -> None:
    rows = [(x, y, z, 2 * x + 3 * y + 0.5 * z) for x, y, z in ((1, 1, 5), (2, 3, 1), (1, 0, 9), (2, 2, 2.5))]
    assert nonnegative([tuple(map(float, row)) for row in rows]) == pytest.approx((2, 3, 0.5))
    falling = [(1.0, 1.0, 3.0), (1.0, 2.0, 2.0), (1.0, 4.0, 1.0)]
    assert min(nonnegative(falling)) == 0
