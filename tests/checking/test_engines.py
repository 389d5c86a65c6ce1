"""Jobs of five engines: clean ones are alike, and faults of public reports are found, with their place and cause."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.checked import dtensors, gpt, pipelines, replicas, sharded, split, stages
from benchmarks.checking import CASES, Case, judged, recorded, references_in
from pipeflow.checking import check
from pipeflow.testing import run_processes
from tests.covering import some

pytestmark = pytest.mark.slow
ENGINES = (replicas, split, stages, dtensors, sharded, pipelines)


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return references_in(tmp_path_factory.mktemp("plain"))


@pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: engine.__name__.rpartition(".")[2])
def test_clean_jobs_are_alike(engine: object, references: dict[str, Path], tmp_path: Path) -> None:
    run_processes(engine.run, 2, str(tmp_path))  # type: ignore[attr-defined]  # each has it
    result = check(references["plain"], tmp_path)
    assert result.alike, result.first
    assert not result.notes
    assert result.compared["outputs"] > 80
    assert result.compared["gradients"] == 2 * len([*gpt.model().parameters()])


def test_tensor_ranks_of_a_pipeline(references: dict[str, Path], tmp_path: Path) -> None:
    run_processes(pipelines.run, 4, str(tmp_path), "", gpt.SIZES, "zb-v", tensor=2)
    assert check(references["plain"], tmp_path).alike


@pytest.mark.parametrize("with_originals", [True, False])
def test_flat_parameters(with_originals: bool, references: dict[str, Path], tmp_path: Path) -> None:
    """Those of FSDP1, whose shards begin and end within rows."""
    run_processes(sharded.run_flat, 2, str(tmp_path), with_originals)
    result = check(references["plain"], tmp_path)
    assert result.alike, result.first
    assert not result.notes
    assert result.compared["outputs"] > 80


@pytest.mark.parametrize("case", some(CASES, CASES[::3]), ids=lambda case: case.report)
def test_faults_are_found(case: Case, references: dict[str, Path], tmp_path: Path) -> None:
    result = recorded(case, tmp_path, references)
    assert judged(case, result) == (True, True, True), result.first
