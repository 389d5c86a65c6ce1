"""An order as DeepSpeed's engine executes it: here by an interpreter whose sends and receives block until both sides
are there, as the strictest transport does. Version 0.19.8 ran such orders with the losses of its own.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pipeflow.core.analysis.other_engines import Step, deepspeed_schedule, deepspeed_seconds, deepspeed_steps
from pipeflow.core.analysis.simulation import simulate
from pipeflow.core.cost import CostModel
from pipeflow.core.errors import UsageError
from pipeflow.core.schedule import Schedule
from pipeflow.schedules import make_schedule

SIZES = [(2, 1), (2, 4), (3, 6), (4, 4), (4, 9), (8, 16)]
PARTNER = {"SendActivation": 1, "RecvActivation": -1, "SendGrad": -1, "RecvGrad": 1}
OTHER = {"SendActivation": "RecvActivation", "SendGrad": "RecvGrad"}


def executed(steps: list[list[Step]]) -> list[str]:
    """The computations of each rank as a line of a table. Fails where ranks wait for each other."""
    todo = [[each for step in rank for each in step] for rank in steps]
    held: list[dict[int, int]] = [{} for _ in todo]  # per rank and buffer, the microbatch
    loads, lines = [0] * len(todo), [""] * len(todo)
    while any(todo):
        for rank, mine in enumerate(todo):
            before = sum(map(len, todo))
            if not mine:
                continue
            name, buffer = mine[0]
            if name in OTHER:
                peer = rank + PARTNER[name]
                if todo[peer][:1] and todo[peer][0][0] == OTHER[name]:
                    there = todo[peer].pop(0)[1]
                    mine.pop(0)
                    assert buffer is not None
                    assert there is not None
                    if name == "SendActivation":
                        assert there not in held[peer]  # nothing is overwritten
                        held[peer][there] = held[rank][buffer]
                    else:
                        assert held[peer][there] == held[rank].pop(buffer)
                        assert todo[peer][0] == ("BackwardPass", there)  # there is one place for a gradient
                    break
            elif name not in ("RecvActivation", "RecvGrad"):
                mine.pop(0)
                if name == "LoadMicroBatch" and buffer is not None:
                    assert held[rank].setdefault(buffer, loads[rank]) == loads[rank]
                    loads[rank] += 1
                elif name in ("ForwardPass", "BackwardPass") and buffer is not None:
                    lines[rank] += f"{rank}{name[0]}{held[rank][buffer]},"
                    if name == "BackwardPass" and rank == 0:
                        held[rank].pop(buffer)
                break
        else:
            pytest.fail(f"ranks wait for each other: {[each[:1] for each in todo]}")
        assert sum(map(len, todo)) < before
    assert not any(held)
    return [line[:-1] for line in lines]


@pytest.mark.parametrize(("ranks", "microbatches"), SIZES)
@pytest.mark.parametrize("name", ["1f1b", "eager-1f1b"])
def test_the_engine_runs_the_order(name: str, ranks: int, microbatches: int) -> None:
    schedule = make_schedule(name, ranks=ranks, microbatches=microbatches)
    assert executed(deepspeed_steps(schedule)) == schedule.to_csv().splitlines()


@pytest.mark.parametrize(
    ("schedule", "said"),
    [
        (make_schedule("zb-h1", ranks=2, microbatches=4), "has only forwards and whole backwards"),
        (make_schedule("interleaved-1f1b", ranks=2, microbatches=4), "has one stage on each rank"),
        (make_schedule("gpipe", ranks=2, microbatches=4), "on the last rank each backward must follow its forward"),
        (Schedule.from_csv("0F1,0F0,0B0,0B1\n1F0,1B0,1F1,1B1"), "has several orders of forwards"),
    ],
)
def test_what_the_engine_cannot_execute_is_refused(schedule: Schedule, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        deepspeed_steps(schedule)


def test_a_step_takes_as_long_as_its_blocking_transfers_let_it() -> None:
    """DeepSpeed 0.19.8 took 5 to 8 % longer with the second order than with the first one."""
    own, eager = (make_schedule(name, ranks=4, microbatches=16) for name in ("1f1b", "eager-1f1b"))
    cost = CostModel(forward=(2, 1, 1, 1), backward_input=(0, 1, 1, 1), backward_weight=(0, 1, 1, 1), latency=0.08)
    assert simulate(eager, cost).makespan < simulate(own, cost).makespan
    assert deepspeed_seconds(own, cost) < deepspeed_seconds(eager, cost)


def test_a_transfer_that_blocks_holds_up_both_ranks() -> None:
    """Rank 0 may send its second activation only when rank 1 takes it, after its first backward."""
    cost = CostModel(forward=(1, 10), backward_input=(1, 1), backward_weight=(1, 1), latency=0.5)
    expected = 1 + 0.5 + (10 + 2 + 0.5) + (0.5 + 10 + 2) + 0.5 + 2  # F0, sent; F0 B0 and its gradient; the same; B1
    assert deepspeed_seconds(make_schedule("1f1b", ranks=2, microbatches=2), cost) == expected
    with pytest.raises(UsageError, match="stage 2 has no cost"):
        deepspeed_seconds(make_schedule("1f1b", ranks=3, microbatches=3), cost)


class PipeSchedule:
    """What DeepSpeed's class of this name has."""

    def __init__(self, micro_batches: int, stages: int, stage_id: int) -> None:
        self.micro_batches, self.stages, self.stage_id = micro_batches, stages, stage_id


def test_it_takes_the_place_of_deepspeeds_schedule() -> None:
    def made(name: str) -> Any:
        return lambda *buffer: (name, *buffer)

    names = (
        "SendActivation",
        "RecvActivation",
        "SendGrad",
        "RecvGrad",
        "LoadMicroBatch",
        "ForwardPass",
        "BackwardPass",
    )
    ends = ("ReduceTiedGrads", "ReduceGrads", "OptimizerStep")
    module = SimpleNamespace(PipeSchedule=PipeSchedule, **{name: made(name) for name in (*names, *ends)})
    order: Any = deepspeed_schedule(make_schedule("1f1b", ranks=3, microbatches=4), module)
    first = order(micro_batches=4, stages=3, stage_id=0)
    assert first.num_pipe_buffers() == 3
    steps = list(first.steps())
    assert steps[0] == [("LoadMicroBatch", 0), ("ForwardPass", 0)]
    assert steps[-1] == [(name,) for name in ends]
    with pytest.raises(UsageError, match="has 4 microbatches and 3 stages, but the engine has 8 and 3"):
        list(order(micro_batches=8, stages=3, stage_id=0).steps())
