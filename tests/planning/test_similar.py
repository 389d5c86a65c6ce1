"""The error that plans of similar jobs had."""

from __future__ import annotations

import json
import math

import pytest

from benchmarks.planner import Judged, held_of, promised
from benchmarks.planner_tables import LAST, MARK, ROOT, SIMILAR, similar_rows
from pipeflow import GPT, PRECISIONS, Cluster, Setup
from pipeflow.planning.similar import KINDS, Kind, kind_of, said, similar_error
from pipeflow.tools.cli.command import main

MODEL = GPT(4, 512, 4, 512, 8192)


def test_the_errors_are_those_of_the_benchmark() -> None:
    data = json.loads((ROOT / "benchmarks" / "results" / "planner.json").read_text(encoding="utf-8"))["data"]
    rows = SIMILAR.read_text(encoding="utf-8").split(MARK)[1].split(LAST)[0]
    assert rows == similar_rows(data), "python -m benchmarks planner --save writes them anew"


def test_kinds_of_jobs_differ_in_device_precision_and_sharding() -> None:
    a100, h100, v100 = (Cluster.of(name) for name in ("a100-40gb", "h200", "v100-32gb"))
    fp8, half = (Setup(precision=PRECISIONS[name]) for name in ("fp8", "fp16"))
    assert str(kind_of(MODEL, Setup(), a100)) == "a100, 16 bits"
    assert str(kind_of(MODEL, fp8, h100)) == "h100, 8 bits"
    assert str(kind_of(MODEL, half, v100)) == "v100, 16 bits"
    assert str(kind_of(GPT(4, 512, 4, experts=8), Setup(), a100)) == "a100, 16 bits, experts"
    divided = Setup(zero=3, data=2, frozen=True)
    assert str(kind_of(MODEL, divided, h100)) == "h100, 16 bits, sharded weights, frozen weights"


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


@pytest.mark.parametrize("words", [["mi300x"], ["b200", "--experts", "8"]], ids=["none", "one publisher"])
def test_a_plan_says_so_if_no_two_publishers_measured_such_jobs(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "gpt2-xl", "--device", *words]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "how far this is off is not known: jobs like this were not measured by two publishers" in said


A100, H100 = Kind("a100", "16 bits"), Kind("h100", "16 bits")


def judged(kind: Kind, source: str, *errors: float) -> list[Judged]:
    return [Judged(kind, source, error) for error in errors]


def test_each_publisher_is_one_observation_of_what_is_promised() -> None:
    other = judged(A100, "other", 0.1, -0.1)
    few, many = (promised(A100, [*judged(A100, "one-a100", *[0.0] * rows), *other]) for rows in (1, 1000))
    assert few | {"rows": 1002} == many
    assert few["error"] == 0.05


def test_errors_of_all_kinds_of_jobs_count_beside_those_of_few_publishers() -> None:
    """As four publishers; within Student's distribution, with five degrees of freedom for two publishers."""
    far = Kind("b200", "8 bits", experts=True)
    found = [*judged(A100, "one", 0.1), *judged(A100, "other", 0.1), *judged(far, "third", 0.4)]
    assert promised(A100, found)["most"] == pytest.approx(2.02 * math.sqrt((4 * 0.06 + 2 * 0.01) / 6))
    many = [each for number in range(20) for each in judged(A100, f"source{number}", 0.1)]
    assert promised(A100, many)["most"] == pytest.approx(1.78 * 0.1)


def test_a_publisher_of_near_jobs_counts_half() -> None:
    found = [*judged(A100, "one", 0.1), *judged(H100, "other", 0.2), *judged(A100, "other", 0.0)]
    most = {kind: promised(kind, found)["most"] for kind in (A100, H100)}
    pooled = 4 * (0.01 + 0.02) / 2
    assert most[A100] == pytest.approx(2.02 * math.sqrt((pooled + 0.01 + 0.0) / 6))
    assert most[H100] == pytest.approx(2.02 * math.sqrt((pooled + 0.5 * 0.01 + 0.04) / 5.5))


def test_nothing_is_promised_of_jobs_that_fewer_than_two_publishers_measured() -> None:
    found = [*judged(A100, "nemo-one", 0.1), *judged(A100, "dgxc-other", 0.1)]  # both are NVIDIA's
    assert promised(A100, found) == {}
    both = [*found, *judged(H100, "other", 0.1)]
    assert promised(A100, both)["sources"] == 2
    assert promised(A100._replace(experts=True), both) == {}
    assert promised(Kind("b200", "8 bits"), both) == {}


def test_a_promise_is_judged_without_the_publisher() -> None:
    """The others promise 2.02 x 0.1."""
    others = [each for name in ("one", "other") for each in judged(A100, name, 0.1)]
    routed = A100._replace(experts=True)
    own = judged(A100, "own-a", 0.1, -0.3), judged(A100, "own-b", 0.9), judged(routed, "own-a", 0.1)
    assert held_of("own-a", [*others, *(each for part in own for each in part)]) == {
        "source": "own-a",
        "rows": 2,
        "held": 1,
    }
