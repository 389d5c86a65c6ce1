"""Measured: the costs that a timeline shows. Must not contain: measuring, which the engine does."""

from __future__ import annotations

from statistics import fmean

from pipeflow.analysis.idle_time import pauses, waits
from pipeflow.core.action import Kind
from pipeflow.core.cost import TIMES, CostModel
from pipeflow.core.dataflow import DATAFLOW
from pipeflow.core.timeline import Timeline

COPIED = (Kind.O, Kind.L)
"""The kinds of action whose time is that of a copy between a device and its host."""


def measured_costs(timeline: Timeline) -> CostModel:
    """The costs that a timeline shows. The time of an action is the mean over the actions of its kind and stage. It
    includes the time before an action in which the rank has all inputs, since the engine itself works then. The latency
    is the mean time that an idle rank waited for a value after it was made. The time of a whole backward is divided
    between its halves in the proportion of the backwards that ran in halves, or equally if there are none. When several
    ranks reduce a stage together, the last one to start waits least, so its time is the cost of the reduction.
    """
    times: dict[tuple[Kind, int], list[float]] = {}
    for span in timeline:
        times.setdefault((span.action.kind, span.action.stage), []).append(span.end - span.start)

    latency = max(fmean(waits(timeline) or [0.0]), 0.0)  # clocks of ranks differ a little
    between = {kind: fmean(gaps) for kind, gaps in pauses(timeline, latency).items()}

    def mean(kind: Kind, stage: int) -> float:
        found = times.get((kind, stage))
        return fmean(found) + between.get(kind, 0.0) if found else 0.0

    def halves(stage: int) -> tuple[float, float]:
        """The times of the two halves of the mean backward on `stage`."""
        whole, apart = len(times.get((Kind.B, stage), ())), len(times.get((Kind.I, stage), ()))
        first, second = mean(Kind.I, stage), mean(Kind.W, stage)
        both = (whole * mean(Kind.B, stage) + apart * (first + second)) / max(whole + apart, 1)
        part = first / (first + second) if first + second else 0.5
        return both * part, both * (1 - part)

    def copy(stage: int) -> float:
        """The mean time of the copies of a stage; of all stages if it has none."""
        own = [time for kind in COPIED for time in times.get((kind, stage), ())]
        return fmean(own or [time for (kind, _), each in times.items() if kind in COPIED for time in each])

    stages = range(timeline.placement.num_stages)
    kinds = {kind for kind, _ in times}
    further = {kind for kind, _ in times if not DATAFLOW[kind].takes} - set(TIMES.values())
    backward_input, backward_weight = zip(*map(halves, stages), strict=True)
    return CostModel(
        forward=tuple(mean(Kind.F, stage) for stage in stages),
        backward_input=backward_input,
        backward_weight=backward_weight,
        latency=latency,
        reduce=tuple(min(times.get((Kind.R, stage), [0.0])) for stage in stages) if Kind.R in kinds else (),
        optimizer=tuple(mean(Kind.S, stage) for stage in stages) if Kind.S in kinds else (),
        recompute=tuple(mean(Kind.C, stage) or mean(Kind.F, stage) for stage in stages) if Kind.C in kinds else (),
        offload=tuple(map(copy, stages)) if kinds & {*COPIED} else (),
        unshard=tuple(mean(Kind.U, stage) for stage in stages) if Kind.U in kinds else (),
        times={kind: tuple(mean(kind, stage) for stage in stages) for kind in sorted(further)},
        unit=timeline.unit,
    )
