"""The engine runs no slices yet."""

from __future__ import annotations

import pytest

from pipeflow.core.errors import UsageError
from pipeflow.engine.runtime.program.compile import require_sound
from pipeflow.schedules import make_schedule


def test_the_engine_refuses_slices() -> None:
    schedule = make_schedule("seq1f1b", ranks=2, microbatches=2, slices=2)
    with pytest.raises(UsageError, match="the engine cannot take slices of microbatches yet"):
        require_sound(schedule, schedule.placement)
