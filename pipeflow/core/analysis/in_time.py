"""In time: a clock of a simulation that stops as soon as the step is known to take too long. Must not contain: when
actions run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from pipeflow.core.dataflow import DATAFLOW, Stream
from pipeflow.core.pairing import Pairing
from pipeflow.core.schedule import Schedule

if TYPE_CHECKING:
    from pipeflow.core.analysis.simulation import Durations, Part, Ran

ROUNDING = 1e-9  # by which a sum of times may be off
BESIDE = {kind: flow.stream for kind, flow in DATAFLOW.items() if flow.stream is not Stream.COMPUTE}
"""The streams of the kinds of action that run beside computations."""


class LateError(Exception):
    """A step that takes longer than a simulation was asked to go on for."""


def in_time(clock: Iterable[Ran], left: list[float], within: float) -> Iterator[Ran]:
    """The turns of a clock, as long as each rank can end its computations `within` a time. `left` are per rank the
    seconds of its computations, or less; the clock counts them down. Raises LateError at the first turn of a rank that
    was idle for too long.
    """
    latest = within * (1 + ROUNDING)
    for ran in clock:
        (rank, actions, *_), start, end, *_ = ran
        if actions[0].kind not in BESIDE:
            if start + left[rank] > latest:
                raise LateError
            left[rank] -= end - start
        yield ran


def work_of(schedule: Schedule, usual: Durations, varied: Mapping[Part, Durations], pairing: Pairing) -> list[float]:
    """Per rank, the seconds of its computations if it has a processor alone; or less, where pairs take less time than
    their actions alone. The arguments are as in `unlimited`.
    """
    return [
        pairing.least
        * sum(
            (varied.get((each.microbatch, each.slice), usual) if varied else usual)[each.kind][each.stage]
            for each in schedule.actions(rank)
            if each.kind not in BESIDE
        )
        for rank in range(len(schedule.rows))
    ]
