"""Devices and clusters: what is known of them, what is refused, and that a file keeps all of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeflow import UsageError
from pipeflow.planning.cluster import Cluster
from pipeflow.planning.device import DEVICES, LINK_BANDWIDTHS, USUAL, Device

A100 = Cluster.of("a100-80gb")


@pytest.mark.parametrize("name", DEVICES)
def test_rates_are_in_the_order_that_hardware_has_them(name: str) -> None:
    """A narrower type is never slower, float8 is twice as fast as 16 bits, TF32 half as fast, all to a rounding."""
    device = Device.named(name.upper())
    flops = device.flops
    assert set(flops) <= {"fp16", "bf16", "fp8", "fp4", "tf32", "float32"}
    assert flops.get("fp4", 2 * flops.get("fp8", 0)) >= 1.99 * flops.get("fp8", 0)
    assert flops["float32"] <= flops.get("tf32", 0.5 * flops["fp16"]) < flops["fp16"]
    assert flops.get("bf16", flops["fp16"]) == flops["fp16"]
    for wide, narrow in (("tf32", "fp16"), ("fp16", "fp8")):
        if wide in flops and narrow in flops:
            assert flops[narrow] / flops[wide] == pytest.approx(2, rel=0.03)
    assert 30 < flops["fp16"] / device.memory_bandwidth < 500  # operations per byte
    assert LINK_BANDWIDTHS[name] < device.memory_bandwidth / 4
    assert device.host_bandwidth <= LINK_BANDWIDTHS[name]
    assert device.host_bandwidth in (16e9, 32e9, 36e9, 64e9, 128e9, 225e9)  # PCIe 3 to 6; Infinity Fabric; NVLink-C2C


def test_published_numbers_of_the_a100() -> None:
    assert A100.device == Device(
        "a100-80gb",
        {"fp16": 312e12, "bf16": 312e12, "tf32": 156e12, "float32": 19.5e12},
        memory_bytes=80 * 2**30,
        memory_bandwidth=2039e9,
        host_bandwidth=32e9,
        limit="units",
    )
    assert (A100.devices_per_node, A100.link_bandwidth, A100.network_bandwidth) == (8, 300e9, 25e9)


def test_what_is_given_takes_the_place_of_what_is_usual() -> None:
    given = Cluster.of("h100-80gb", devices_per_node=4, link_bandwidth=1e9, network_bandwidth=None, link_latency=0)
    assert (given.devices_per_node, given.link_bandwidth, given.link_latency) == (4, 1e9, 0)
    assert given.network_bandwidth == A100.network_bandwidth
    own = Device("own", {"bf16": 1e12}, 1e9, 1e10)
    assert Cluster.of(own, link_bandwidth=2e9) == Cluster(own, link_bandwidth=2e9)


def test_a_file_keeps_everything(tmp_path: Path) -> None:
    path = tmp_path / "cluster.json"
    own = Device("our own", {"float32": 2.5e10, "bf16": 1e10}, memory_bytes=15e9, memory_bandwidth=1.1e10)
    cluster = Cluster(
        own,
        devices_per_node=3,
        link_bandwidth=1.5e9,
        link_latency=2e-5,
        network_bandwidth=1.25e8,
        network_latency=3e-4,
        devices_per_nic=3,
        efficiency={"products": 0.7},
    )
    for each in (A100, cluster):
        each.save(path)
        assert Cluster.load(path) == each
    assert [each.name for each in tmp_path.iterdir()] == ["cluster.json"]
    content = json.loads(path.read_text(encoding="utf-8"))
    assert content["units"]["network_bandwidth"] == "bytes/s per device, one way"
    del content["efficiency"], content["units"], content["device"]["limit"]
    path.write_text(json.dumps(content), encoding="utf-8")
    assert Cluster.load(path) == replace(cluster, efficiency={})


def test_a_save_that_fails_leaves_the_file_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "cluster.json"
    A100.save(path)

    def full(self: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(UsageError, match=r"cluster\.json: No space left on device"):
        Cluster.of("t4").save(path)
    monkeypatch.undo()
    assert Cluster.load(path) == A100
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda it: it.pop("link_latency"), "a cluster lacks link_latency; its keys are device, devices_per_nic, dev"),
        (
            lambda it: it["device"].pop("flops"),
            "the device of a cluster lacks flops; its keys are flops, host_bandwidth, ",
        ),
        (
            lambda it: it.update(speed=1) or it.pop("device"),
            "a cluster lacks device and has unknown speed; its keys are",
        ),
        (lambda it: it.update(device=[it["device"]] * 2), "device must be one value: .* write groups"),
        (lambda it: it.update(devices_per_node=[8, 4]), "devices_per_node must be one value: .* write groups"),
        (lambda it: it.update(device="a100"), "the device of a cluster must be an object with flops, .*; got 'a100'"),
        (lambda it: it.update(link_bandwidth=300), "link_bandwidth is 300, less than 1e\\+06: the unit is probably wr"),
        (
            lambda it: it.update(network_bandwidth=200e12),
            "network_bandwidth is 2e\\+14, more than 1e\\+14: .*not in GB/s or Gbit/s: ",
        ),
        (lambda it: it["device"].update(memory_bandwidth=2039), "memory_bandwidth is 2039, less .*300 GB/s are 300e9"),
        (lambda it: it["device"].update(memory_bytes=80), "memory_bytes is 80, less .* 80 GB are 80e9"),
        (lambda it: it["device"]["flops"].update(bf16=312), "flops of bf16 is 312, less .* 312 TFLOP/s are 312e12"),
        (lambda it: it["device"].update(flops={}), "device 'a100-80gb' has no flops: give FLOP/s per precision"),
        (lambda it: it.update(link_latency=5), "link_latency is 5, more than 1: .* 5 microseconds are 5e-6"),
        (lambda it: it.update(network_latency=-1e-6), "network_latency is -1e-06, less than 0: "),
        (lambda it: it.update(link_bandwidth="300e9"), "link_bandwidth must be a number in bytes/s.*; got '300e9'"),
        (lambda it: it.update(link_bandwidth=True), "link_bandwidth must be a number in bytes/s.*; got True"),
        (lambda it: it.update(link_bandwidth=float("nan")), "link_bandwidth must be a number in bytes/s.*; got nan"),
        (lambda it: it.update(devices_per_node=8.0), "devices_per_node must be an integer of at least 1, got 8.0"),
        (
            lambda it: it["units"].update(link_bandwidth="GB/s"),
            "link_bandwidth is given in 'GB/s', but .* in bytes/s per",
        ),
        (lambda it: it["units"].update(speed="m/s"), "units has unknown speed; its keys are flops, memory_bytes"),
        (lambda it: it.update(units="SI"), "units must be an object of names and units, got 'SI'"),
        (lambda it: it.update(efficiency={"products": "high"}), "efficiency must be an object of names and numbers"),
        (lambda it: it["device"].update(flops=[1]), "flops must be an object of names and numbers, got \\[1\\]"),
        (lambda it: it["device"].update(name=1), "the name of the device must be text, got 1"),
    ],
)
def test_a_file_that_cannot_be_is_one_error(
    tmp_path: Path, change: Callable[[dict[str, Any]], object], message: str
) -> None:
    path = tmp_path / "cluster.json"
    A100.save(path)
    content = json.loads(path.read_text(encoding="utf-8"))
    change(content)
    path.write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(UsageError, match=rf"cluster\.json: {message}"):
        Cluster.load(path)


def test_names_of_devices_are_read_as_people_write_them() -> None:
    assert Device.named(" A100_80GB ") == Device.named("A100 80GB") == Device.named("a100-80gb")


@pytest.mark.parametrize("series", ["v100", "a100", "h100", "h200", "b200", "b300", "gb200", "gb300", "mi300x"])
def test_a_series_stands_for_its_usual_device(series: str) -> None:
    assert Device.named(series).name.startswith(series)
    assert Cluster.of(series).devices_per_node == (72 if series.startswith("gb") else 8)


def test_names_without_a_size_are_no_other_devices() -> None:
    assert not set(USUAL) & set(DEVICES)
    assert all(name in DEVICES and name.startswith(short.removesuffix("-sxm")) for short, name in USUAL.items())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: Device.named("a100-"),
            "unknown device 'a100-'; did you mean a100-40gb or a100-80gb or a100-64gb or a100-pcie",
        ),
        (
            lambda: Device.named("h1oo"),
            "unknown device 'h1oo'; did you mean h100-80gb or h100-64gb or h100-96gb or h100-pcie or ",
        ),
        (lambda: Device.named("tpu-v5"), "unknown device 'tpu-v5'; known: v100-16gb, .* any other one in a cluster f"),
        (lambda: Cluster.of(Device("own", {"bf16": 1e12}, 1e9, 1e10)), "'own' has no usual link: give link_bandwidth"),
        (lambda: replace(A100.device, limit="heat"), "limit must be 'power', 'units' or '' .* got 'heat'"),
        (lambda: Cluster.of("t4", devices_per_nic=3), "3 devices per network .* 8 of a node: use 1 or 2 or 4 or 8"),
        (lambda: Cluster.of("t4", link_bandwidth=32), "link_bandwidth is 32, less than 1e\\+06"),
        (lambda: Cluster.load("no such file"), "no such file: No such file or directory"),
        (lambda: A100.save("/no such folder/file"), "/no such folder/file: No such file or directory"),
    ],
)
def test_what_cannot_be_is_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make()


@pytest.mark.parametrize("text", ["", "[1]", "{", "\x00"])
def test_other_files_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UsageError, match=r"other\.json: (this is not JSON|a cluster must be an object with device)"):
        Cluster.load(path)
