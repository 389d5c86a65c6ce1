"""The script of the guide runs as it stands there."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.guides import blocks, guide
from tests.scripts import said_by_ranks

pytest.importorskip("lightning", reason="not installed", exc_type=ImportError)


@pytest.mark.slow
def test_the_script_of_the_guide_trains_and_saves(tmp_path: Path) -> None:
    [script] = blocks(guide("docs/lightning.md"), "python")
    (tmp_path / "script.py").write_text(script)
    said_by_ranks(tmp_path / "script.py", ranks=2, folder=tmp_path)
    assert (tmp_path / "last.ckpt").is_dir()
