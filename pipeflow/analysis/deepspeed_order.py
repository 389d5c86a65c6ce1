"""An order as DeepSpeed's pipeline engine executes it: instructions with their buffers. Must not contain: an import of
DeepSpeed, which the caller passes.

Names and meanings are from deepspeedai/DeepSpeed: deepspeed/runtime/pipe/schedule.py (instructions) and
deepspeed/runtime/pipe/engine.py (what executes them).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Any

from pipeflow.analysis.simulation import simulate
from pipeflow.core.action import Action, Kind, Pair
from pipeflow.core.errors import UsageError
from pipeflow.core.placement import Placement
from pipeflow.core.schedule import Schedule

Instruction = tuple[str, int | None]  # its name, and its buffer
Step = list[Instruction]
Event = tuple[float, int, int, Step]  # when, what comes first at the same time, rank, instructions without buffers

LAST: Step = [("ReduceTiedGrads", None), ("ReduceGrads", None), ("OptimizerStep", None)]

# Theory of operation
#
# DeepSpeed's sends and receives block. So there must be one order of all computations and transfers in which each rank
# has its part; then no rank can wait for another one that waits for it. Here it is the order of a simulation, with a
# transfer of an activation when it was made. The engine has one place for a gradient that was received, so a gradient
# is transferred just before the backward that needs it. It has one place for a loss, too, so on the last rank each
# backward directly follows its forward, and an activation is transferred just before that.


def deepspeed_schedule(schedule: Schedule, module: Any) -> type:
    """A `PipeSchedule` of DeepSpeed that executes the order of `schedule`. It takes the place of its `TrainSchedule`:

        from deepspeed.runtime.pipe import schedule
        schedule.TrainSchedule = pipeflow.deepspeed_schedule(order, schedule)

    Args:
        schedule: the order, with one stage per rank and whole backwards.
        module: `deepspeed.runtime.pipe.schedule`, which has the classes of instructions.

    Raises UsageError for an order that the engine cannot execute, and ScheduleError for one that cannot run to its end.
    """
    steps = deepspeed_steps(schedule)
    sizes = (schedule.num_microbatches, len(steps))

    class OrderedSchedule(module.PipeSchedule):  # type: ignore[misc]  # DeepSpeed's
        """Executes the order of a schedule that pipeflow made."""

        def steps(self) -> Iterator[list[Any]]:
            if (self.micro_batches, self.stages) != sizes:
                raise UsageError(
                    f"{schedule.name} has {sizes[0]} microbatches and {sizes[1]} stages, but the engine has "
                    f"{self.micro_batches} and {self.stages}"
                )
            for step in steps[self.stage_id]:
                yield [
                    getattr(module, name)() if buffer is None else getattr(module, name)(buffer)
                    for name, buffer in step
                ]

        def num_pipe_buffers(self) -> int:
            found = (buffer for step in steps[self.stage_id] for _, buffer in step if buffer is not None)
            return max(2, 1 + max(found, default=0))

    return OrderedSchedule


def deepspeed_steps(schedule: Schedule) -> list[list[Step]]:
    """Per rank, its steps: each has transfers and ends with a computation. Raises like `deepspeed_schedule`."""
    _require(schedule)
    found: list[list[Step]] = [[[]] for _ in schedule.rows]
    buffers = [_Buffers() for _ in schedule.rows]
    for _, _, rank, step in sorted(_events(schedule), key=lambda event: event[:3]):
        for name, microbatch in step:
            assert microbatch is not None
            found[rank][-1].append((name, buffers[rank].of(microbatch)))
            if name == "SendGrad" or (name == "BackwardPass" and rank == 0):
                buffers[rank].free(microbatch)
            if name in ("ForwardPass", "BackwardPass"):
                found[rank].append([])
    for steps in found:
        steps[-1] += LAST
    return found


class _Buffers:
    """The buffers of a rank: a microbatch keeps the first free one."""

    def __init__(self) -> None:
        self._free: list[int] = []
        self._taken: dict[int, int] = {}
        self._made = 0

    def of(self, microbatch: int) -> int:
        if microbatch not in self._taken:
            if not self._free:
                self._free.append(self._made)
                self._made += 1
            self._taken[microbatch] = heapq.heappop(self._free)
        return self._taken[microbatch]

    def free(self, microbatch: int) -> None:
        heapq.heappush(self._free, self._taken.pop(microbatch))


def _events(schedule: Schedule) -> Iterator[Event]:
    """The computations of all ranks when they start, and the transfers before those that start at the same time."""
    timeline = simulate(schedule)
    starts = {span.action: span.start for span in timeline}
    last = len(schedule.rows) - 1
    for span in timeline:
        rank, many, kind = span.rank, span.action.microbatch, span.action.kind
        if kind is Kind.F:
            loads: Step = [("LoadMicroBatch", many)] if rank in (0, last) else []
            yield span.start, 1, rank, [*loads, ("ForwardPass", many)]
            if rank < last:
                made = span.end if rank + 1 < last else starts[Action(Kind.F, last, many)]
                yield made, 0, rank, [("SendActivation", many)]
                yield made, 0, rank + 1, [("RecvActivation", many)]
        else:
            yield span.start, 1, rank, [("BackwardPass", many)]
            if rank > 0:
                needed = starts[Action(Kind.B, rank - 1, many)]
                yield needed, 0, rank, [("SendGrad", many)]
                yield needed, 0, rank - 1, [("RecvGrad", many)]


def _require(schedule: Schedule) -> None:
    """Raises UsageError for an order that DeepSpeed's engine cannot execute."""
    ranks = len(schedule.rows)
    if schedule.placement != Placement.looped(ranks, 1):
        raise UsageError(f"DeepSpeed has one stage on each rank, and {schedule.name} has another placement")
    rows = [[entry for entry in row if isinstance(entry, Action)] for row in schedule.without_reductions().rows]
    if any(isinstance(entry, Pair) for row in schedule.rows for entry in row) or any(
        each.kind not in (Kind.F, Kind.B) for row in rows for each in row
    ):
        raise UsageError(f"DeepSpeed has only forwards and whole backwards, and {schedule.name} has other actions")
    forwards = [[each.microbatch for each in row if each.kind is Kind.F] for row in rows]
    if any(each != forwards[0] for each in forwards):
        raise UsageError(f"DeepSpeed loads batches in one order, and {schedule.name} has several orders of forwards")
    kinds = [each.kind for each in rows[-1]]
    if kinds != [Kind.F, Kind.B] * (len(kinds) // 2):
        raise UsageError(
            f"DeepSpeed keeps one loss, so on the last rank each backward must follow its forward, unlike in "
            f"{schedule.name}"
        )
