from __future__ import annotations

from collections.abc import Callable

import pytest

from pipeflow.core.action import Action, Kind, actions_of
from pipeflow.core.analysis.lowering import lower
from pipeflow.core.dataflow import Content, Value
from pipeflow.core.program import Compute, Program, Recv, Release, Send
from pipeflow.core.schedule import Schedule
from pipeflow.core.soundness.transfers import verify_programs
from pipeflow.core.soundness.verification import verify


@pytest.fixture(scope="session")
def require_sound() -> Callable[[Schedule], None]:
    return _require_sound


def _require_sound(schedule: Schedule) -> None:
    """Nothing is wrong with the schedule, its programs, and the same without backwards."""
    assert verify(schedule) == []
    assert verify(schedule.forward_only()) == []
    programs = lower(schedule)
    assert verify_programs(programs) == []
    for program, row in zip(programs, schedule.rows, strict=True):
        assert tuple(step.entry for step in program.instructions if isinstance(step, Compute)) == row
        _require_receives(program, schedule)
        _require_releases(program)


def _require_receives(program: Program, schedule: Schedule) -> None:
    """Every value from elsewhere is posted once, before the action that uses it."""
    posted = set()
    for step in program.instructions:
        match step:
            case Recv(value, _):
                assert value not in posted
                posted.add(value)
            case Compute(entry):
                for action in actions_of(entry):
                    if (needed := _from_elsewhere(action, program.rank, schedule)) is not None:
                        posted.remove(needed)
            case _:
                pass
    assert not posted


def _from_elsewhere(action: Action, rank: int, schedule: Schedule) -> Value | None:
    """What another rank makes for `action`, said without the dataflow table."""
    if action.kind is Kind.W:
        return None
    forward = action.kind is Kind.F
    stage = action.stage + (-1 if forward else 1)
    if not 0 <= stage < schedule.placement.num_stages:
        return None
    if schedule.placement.rank_of(stage, action.microbatch) == rank:
        return None
    return Value(Content.ACTIVATION if forward else Content.GRADIENT, stage, action.microbatch)


def _require_releases(program: Program) -> None:
    """Every value sent is let go of once, later."""
    held = set()
    for step in program.instructions:
        match step:
            case Send(value, peer):
                held.add((value, peer))
            case Release(value, peer):
                held.remove((value, peer))
            case _:
                pass
    assert not held
