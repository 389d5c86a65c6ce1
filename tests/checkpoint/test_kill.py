"""A kill at any moment of a save leaves the previous checkpoint loadable. `python -m benchmarks kill` does it often."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.kill import kill_once


@pytest.mark.slow
def test_the_newest_checkpoint_after_a_kill_is_whole(tmp_path: Path) -> None:
    """Each run goes on from what the one before it left."""
    for victim, seconds in ((0, 0.01), (1, 0.1), (0, 0.05)):
        loaded, _, done = kill_once(tmp_path, victim, seconds)
        assert loaded is not None
        assert loaded >= done
