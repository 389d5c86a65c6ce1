"""Another distribution that installs the import of the same name."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeflow.core.distributions import others_in, warn_of_others


def install(folder: Path, name: str, record: str) -> None:
    (folder / name).mkdir()
    (folder / name / "RECORD").write_text(record, encoding="utf-8")


def test_another_distribution_with_the_same_import_is_said(tmp_path: Path) -> None:
    install(tmp_path, "pipeflow_torch-0.1.0.dist-info", "pipeflow/__init__.py,,\n")
    install(tmp_path, "pipeflow_tools-1.0.dist-info", "pipeflow_tools/__init__.py,,\n")
    (tmp_path / "pipeflow_empty-1.0.dist-info").mkdir()
    warn_of_others(str(tmp_path))
    warn_of_others(str(tmp_path / "nowhere"))
    install(tmp_path, "pipeflow-0.5.dist-info", "README,,\npipeflow/__init__.py,,\n")
    install(tmp_path, "pipeflow_lite-0.1.dist-info", "pipeflow/core.py,,\n")
    assert others_in(str(tmp_path)) == ["pipeflow", "pipeflow-lite"]
    said = "pipeflow, pipeflow-lite and pipeflow-torch each install the import pipeflow"
    with pytest.warns(RuntimeWarning, match=said):
        warn_of_others(str(tmp_path))
