"""Jobs of five engines: clean ones are alike, and faults of public reports are found, with their place and cause."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import checking_second
from benchmarks.checked import (
    chunks,
    contexts,
    dtensors,
    experts,
    gpt,
    images,
    llama,
    loops,
    meshes,
    pipelines,
    replicas,
    sharded,
    split,
    stages,
)
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
    assert result.compared["losses"] == 2
    assert result.compared["outputs"] > 80
    assert result.compared["gradients"] == 2 * len([*gpt.model().parameters()])


@pytest.mark.exhaustive
def test_tensor_ranks_of_a_pipeline(references: dict[str, Path], tmp_path: Path) -> None:
    run_processes(pipelines.run, 4, str(tmp_path), "", gpt.SIZES, "zb-v", tensor=2)
    assert check(references["plain"], tmp_path).alike


SECOND = [  # engine, job, reference, options
    (loops, "run", "coarse", (checking_second.COARSE,)),
    (loops, "run", "warm", (llama.SIZES, None, True)),
    (images, "run", "images", ()),
    (chunks, "run", "plain", ()),
    (chunks, "run", "coarse", (checking_second.COARSE, "zbv")),
    (meshes, "tensor", "plain", ()),
    (meshes, "mixed", "mixed", ()),
    (meshes, "clipped", "clipped", ()),
    (contexts, "run", "coarse", (checking_second.COARSE,)),
    (experts, "run", "experts", ()),
]


@pytest.fixture(scope="module")
def second_references(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return checking_second.references_in(tmp_path_factory.mktemp("second"))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("engine", "job", "reference", "options"), SECOND, ids=[f"{x[0].__name__[19:]}-{x[1]}-{x[2]}" for x in SECOND]
)
def test_clean_jobs_of_the_second_set(
    engine: object,
    job: str,
    reference: str,
    options: tuple[object, ...],
    second_references: dict[str, Path],
    tmp_path: Path,
) -> None:
    """In mixed precision, with parts of sequences, experts and several stages on a rank."""
    run_processes(getattr(engine, job), 2, str(tmp_path), "", *options)
    result = check(second_references[reference], tmp_path)
    assert result.alike, result.first
    assert not result.notes
    assert result.compared["losses"] == 2


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", some(checking_second.CASES, checking_second.CASES[3::5]), ids=lambda case: case.report)
def test_faults_of_the_second_set(case: Case, second_references: dict[str, Path], tmp_path: Path) -> None:
    result = recorded(case, tmp_path, second_references)
    named = case.report not in ("S32", "S33", "S34")  # their cause is unknown
    assert judged(case, result) == (True, True, named), result


@pytest.mark.exhaustive
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
