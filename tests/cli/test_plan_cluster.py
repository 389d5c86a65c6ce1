"""What `pipeflow plan` says and takes for clusters of several kinds of nodes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipeflow.planning.cluster import Cluster
from tests.cli.run import error, out

ONE = ["llama3-8b", "--pipeline", 2, "--tensor", 8, "--data", 2, "--microbatches", 4, "--cut", "cost"]


def test_a_plan_says_which_stages_lie_on_which_kind_and_how_nodes_are_listed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    shown = out(capsys, "plan", *ONE, "--device", "h100-80gb:2,a100-80gb:2")
    assert "\nstages: 0 on h100-80gb (nodes of 8), 1 on a100-80gb (nodes of 8)\n" in shown
    used = " ".join(shown.partition("\nUse it")[2].split())
    assert "in this order, 2 times: 1 of h100-80gb with --nproc-per-node 8, 1 of a100-80gb with" in used
    assert "torchrun --nnodes 4 --node-rank R --nproc-per-node N" in used
    assert 'cuts = [f"layers.{n}" for n in' in used
    assert "is not known" in shown


def test_names_files_and_sizes_of_nodes_describe_groups(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    def cluster(*argv: object) -> object:
        return json.loads(out(capsys, "plan", *ONE, "--json", *argv))["cluster"]

    paths = [tmp_path / "one.json", tmp_path / "other.json"]
    for name, path in zip(("h100-80gb", "a100-80gb"), paths, strict=True):
        Cluster.of(name).save(path)
    named = cluster("--device", "h100-80gb:2,a100-80gb")
    assert cluster("--cluster", f"{paths[0]}:2,{paths[1]}:9") == named
    uneven = cluster("--device", "h100-80gb", "--devices-per-node", "8:3,4")
    assert [group["devices_per_node"] for group in uneven["groups"]] == [8, 4]  # type: ignore[index]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--device", "h100-80gb:2,a100-80gb:1"], "the cluster has 24 devices, not 32"),
        (["--device", "h100-80gb,a100-80gb:1"], "each group of nodes before another one needs its number of nodes"),
        (["--device", "h100-80gb:2,"], "it must be one kind, or several with their nodes"),
        (
            ["--device", "h100-80gb", "--devices-per-node", "8:x"],
            "argument --devices-per-node: it must be one kind, or",
        ),
        (["--device", "h100-80gb:2", "--devices-per-node", "8:3"], "h100-80gb has 2 nodes and 3 nodes"),
        (
            ["--device", "h100:1,a100:1,v100:1", "--devices-per-node", "8,4"],
            "--devices-per-node has 2 sizes for 3 kinds of nodes",
        ),
    ],
)
def test_kinds_that_do_not_fit_each_other_are_refused(
    capsys: pytest.CaptureFixture[str], argv: list[str], message: str
) -> None:
    assert error(capsys, "plan", *ONE, *argv).startswith(message)


def test_a_search_says_what_each_kind_may_hold(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["llama3-8b", "--tensor", 8, "--pipeline", 2, "--schedule", "1f1b", "--devices", 16, "--batch", 8]
    shown = out(capsys, "plan", *argv, "--device", "h100-80gb:1,a100-40gb:1")
    assert "16 devices: 8 h100-80gb in nodes of 8 (at most 76." in shown
    assert "8 a100-40gb in nodes of 8 (at most 36." in " ".join(shown.split())
    assert "Stages of 1: 0 on h100-80gb" in " ".join(shown.split())
