"""The script of the guide runs as it stands there."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.guides import blocks, guide
from tests.scripts import run_ranks

pytest.importorskip("accelerate", reason="not installed", exc_type=ImportError)


@pytest.mark.exhaustive
def test_the_script_of_the_guide_trains_and_saves(tmp_path: Path) -> None:
    [script] = blocks(guide("docs/accelerate.md"), "python")
    (tmp_path / "script.py").write_text(script, encoding="utf-8")
    run_ranks(tmp_path / "script.py", ranks=2, folder=tmp_path)
    assert (tmp_path / "state" / "pipeflow").is_dir()
