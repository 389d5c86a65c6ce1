from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from pipeflow.planning.cluster import Cluster
from pipeflow.planning.efficiency import Efficiency
from pipeflow.tools.calibration import measurement
from tests.cli.run import error, out


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pipeflow.tools.cli.outputs.AFTER", 1000.0)


@pytest.mark.exhaustive
def test_a_machine_is_measured(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    file = tmp_path / "cluster.json"
    shown = out(capsys, "calibrate", "--device", "cpu", "--ranks", 2, "--seconds", 1, "--output", file)
    assert "OMP_NUM_THREADS" not in os.environ
    cluster = Cluster.load(file)
    assert cluster.device.name.startswith("cpu, 2 processes of 1 thread on ")
    said = " ".join(shown.partition("\n\n")[0].split())
    assert re.fullmatch(r"A device of this machine reaches at most [\d.]+ \wFLOP/s in products of float32, .*%\.", said)
    assert f"\n{cluster.device.name}; 2 in each node\n" in shown
    assert max(map(len, shown.splitlines())) <= 80
    assert cluster.devices_per_node == 2
    assert Efficiency.of(cluster.efficiency).products == cluster.efficiency["products"] > 0
    for kind in ("products in float32", "elementwise", "attention", "layers, forward", "sums", "transfers"):
        [line] = [each for each in shown.splitlines() if each.startswith(f"{kind} ")]
        assert line.endswith("%")
    assert "not measured, since there is one node" in shown
    assert [each.name for each in tmp_path.iterdir()] == ["cluster.json"]
    assert json.loads(file.read_text(encoding="utf-8"))["units"]["link_latency"] == "s"


@pytest.mark.exhaustive
def test_a_device_that_is_alone_is_measured(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "cluster.json"
    shown = out(capsys, "calibrate", "--device", "cpu", "--ranks", 1, "--seconds", 1, "--output", file)
    assert f"\n{Cluster.load(file).device.name}; 1 in each node\n" in shown
    assert "not measured, since there is one device: the network, taken as 25 GB/s" in shown
    assert "transfer" not in shown
    assert "sums" not in shown


@pytest.mark.exhaustive
def test_processes_that_do_not_end_are_ended(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(measurement, "STARTING", 0.5)
    monkeypatch.setattr(measurement, "SLOWEST", 0.0)
    file = tmp_path / "cluster.json"
    said = error(capsys, "calibrate", "--device", "cpu", "--ranks", 2, "--output", file)
    assert "did not end within 0 s: end other programs that compute on this machine, or measure with fewer" in said
    assert not file.exists()


@pytest.mark.exhaustive
def test_a_process_that_fails(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no-such-interface")
    said = error(capsys, "calibrate", "--device", "cpu", "--ranks", 2, "--output", tmp_path / "cluster.json")
    assert said.startswith("a process that measures failed: ")
    assert "no-such-interface" in said


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--ranks", -3], "ranks must be an integer of at least 1, got -3"),
        (["--device", "tpu"], "unknown device 'tpu': use cpu or cuda"),
        (["--seconds", 0], "--seconds must be from 1 to 3600, got 0"),
        (["--seconds", "nan"], "--seconds must be from 1 to 3600, got nan"),
        (["--output", "/proc"], "/proc: Is a directory"),
        (["--output", "no/such/folder/cluster.json"], "no/such/folder/cluster.json: there is no folder"),
    ],
)
def test_wrong_options(capsys: pytest.CaptureFixture[str], tmp_path: Path, argv: list[object], said: str) -> None:
    assert said in error(capsys, "calibrate", "--output", tmp_path / "cluster.json", "--device", "cpu", *argv)
    assert [*tmp_path.iterdir()] == []


def test_more_ranks_than_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    assert measurement.ranks_on("cuda", None) == 4
    with pytest.raises(ValueError, match="8 ranks need a GPU each, and there are 4"):
        measurement.ranks_on("cuda", 8)


def test_ranks_are_not_for_a_world_that_is_there(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    said = error(capsys, "calibrate", "--ranks", 2, "--output", tmp_path / "cluster.json")
    assert said == "--ranks is for processes that pipeflow starts: leave it out under torchrun"
