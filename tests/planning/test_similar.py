"""The error that plans of similar jobs had."""

from __future__ import annotations

import json
import math

import pytest

from benchmarks.planner import promised
from benchmarks.planner_tables import LAST, MARK, ROOT, SIMILAR, similar_rows
from pipeflow import GPT, PRECISIONS, Cluster, Setup
from pipeflow.planning.similar import KINDS, kind_of, said, similar_error
from pipeflow.tools.cli.command import main

MODEL = GPT(4, 512, 4, 512, 8192)


def test_the_errors_are_those_of_the_benchmark() -> None:
    data = json.loads((ROOT / "benchmarks" / "results" / "planner.json").read_text(encoding="utf-8"))["data"]
    rows = SIMILAR.read_text(encoding="utf-8").split(MARK)[1].split(LAST)[0]
    assert rows == similar_rows(data), "python -m benchmarks planner --save writes them anew"


def test_kinds_of_jobs_differ_in_device_precision_and_sharding() -> None:
    a100, h100, v100 = (Cluster.of(name) for name in ("a100-40gb", "h200", "v100-32gb"))
    fp8, half = (Setup(precision=PRECISIONS[name]) for name in ("fp8", "fp16"))
    assert kind_of(MODEL, Setup(), a100) == "a100, 16 bits"
    assert kind_of(MODEL, fp8, h100) == "h100, 8 bits"
    assert kind_of(MODEL, half, v100) == "v100, 16 bits"
    assert kind_of(GPT(4, 512, 4, experts=8), Setup(), a100) == "a100, 16 bits, experts"
    assert kind_of(MODEL, Setup(zero=3, data=2), h100) == "h100, 16 bits, sharded weights"


def test_a_plan_prints_the_error_of_similar_jobs(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["plan", "gpt2-xl", "--device", "a100-80gb"]
    assert main(command) == 0
    found = similar_error(MODEL, Setup(), Cluster.of("a100-80gb"))
    assert found is not None
    printed = " ".join(capsys.readouterr().out.replace("\n  ", " ").split("\n"))
    assert said(MODEL, Setup(), Cluster.of("a100-80gb")) in printed
    assert main([*command, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["similar_error"] == found
    assert found["error"] == KINDS["a100, 16 bits"][2]


@pytest.mark.parametrize("words", [["mi300x"], ["v100-32gb", "--precision", "fp16"]], ids=["none", "one publisher"])
def test_a_plan_says_so_if_no_two_publishers_measured_such_jobs(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "gpt2-xl", "--device", *words]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "how far this is off is not known: jobs like this were not measured by two publishers" in said


def test_each_publisher_is_one_observation_of_what_is_promised() -> None:
    few, many = ([[0.0] * rows, [0.1, -0.1]] for rows in (1, 1000))
    assert promised(few, 0.01) | {"rows": 0} == promised(many, 0.01) | {"rows": 0}
    assert promised(few, 0.01)["error"] == 0.05


def test_errors_of_all_kinds_of_jobs_count_beside_those_of_few_publishers() -> None:
    """As four publishers; within Student's distribution, with five degrees of freedom for two publishers."""
    assert promised([[0.1]] * 2, 0.04)["most"] == pytest.approx(2.02 * math.sqrt((4 * 0.04 + 2 * 0.01) / 6))
    assert promised([[0.1]] * 20, 0.01)["most"] == pytest.approx(1.78 * 0.1)
