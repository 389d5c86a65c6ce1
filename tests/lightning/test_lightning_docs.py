"""The script of the guide runs as it stands there, and as the guide says: Lightning starts the other process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.guides import ROOT, blocks, guide

pytest.importorskip("lightning", reason="not installed", exc_type=ImportError)


@pytest.mark.exhaustive
def test_the_script_of_the_guide_trains_and_saves(tmp_path: Path) -> None:
    [script] = blocks(guide("docs/lightning.md"), "python")
    (tmp_path / "script.py").write_text(script, encoding="utf-8")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "script.py"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "last.ckpt").is_dir()
