"""A kill at any moment of a save leaves the previous checkpoint loadable."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.checkpoint.killing import RANKS, kill_once


def require_whole_after_kills(folder: Path, kills: list[tuple[int, float]]) -> None:
    """The newest checkpoint is whole, and at least as new as the last that was done. Each run goes on from what the
    one before it left.
    """
    for victim, seconds in kills:
        loaded, done = kill_once(folder, victim, seconds)
        assert loaded is not None, (victim, seconds)
        assert loaded >= done, (victim, seconds)


@pytest.mark.exhaustive
def test_the_newest_checkpoint_after_a_kill_is_whole(tmp_path: Path) -> None:
    require_whole_after_kills(tmp_path, [(0, 0.01), (1, 0.1), (0, 0.05)])


@pytest.mark.drill
def test_the_newest_checkpoint_after_a_kill_at_any_moment_is_whole(tmp_path: Path, turn: int) -> None:
    choices = random.Random(turn)
    require_whole_after_kills(tmp_path, [(choices.randrange(RANKS), choices.uniform(0.0, 0.4)) for _ in range(7)])
