"""CostModel: how long actions and transfers take. Any unit of time, the same throughout."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import fmean, median

from pipeflow.core.action import Kind
from pipeflow.core.errors import UsageError
from pipeflow.core.placement import Placement
from pipeflow.core.timeline import Timeline


@dataclass(frozen=True, slots=True)
class CostModel:
    """Per stage, the time of a forward and of the two halves of a backward; and the time of a transfer.

    A full backward takes both halves. Moving a value between two ranks takes `latency` plus, for each
    stage's activation (and its gradient, of the same size), `activation_bytes[stage] / bandwidth`.

    Raises UsageError for tuples of different lengths and for times that are negative or not finite.
    """

    forward: tuple[float, ...]
    backward_input: tuple[float, ...]
    backward_weight: tuple[float, ...]
    latency: float = 0.0
    bandwidth: float = math.inf
    activation_bytes: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        lengths = {len(self.forward), len(self.backward_input), len(self.backward_weight)}
        if len(lengths) > 1 or len(self.activation_bytes) not in (0, len(self.forward)):
            raise UsageError("a cost model needs one forward, backward_input and backward_weight time per stage")
        numbers = (*self.forward, *self.backward_input, *self.backward_weight, self.latency, *self.activation_bytes)
        if not all(math.isfinite(number) and number >= 0 for number in numbers) or not self.bandwidth > 0:
            raise UsageError("costs must be finite and not negative, and the bandwidth positive")

    @classmethod
    def even(
        cls,
        placement: Placement,
        forward: float = 1,
        backward_input: float = 1,
        backward_weight: float = 1,
        transfer: float = 0,
    ) -> CostModel:
        """The costs of one microbatch on one rank's whole share of the model, divided evenly among its
        chunks, so that schedules with and without chunks compare.
        """
        stages, share = placement.num_stages, placement.chunks_per_rank
        return cls(
            forward=(forward / share,) * stages,
            backward_input=(backward_input / share,) * stages,
            backward_weight=(backward_weight / share,) * stages,
            latency=transfer,
        )

    @classmethod
    def measured(cls, timeline: Timeline) -> CostModel:
        """The costs that a timeline shows: per stage the mean time of its actions (a full backward counted as two
        equal halves), and as latency the median time that an idle rank waited for a value after it was made.
        """
        times: dict[tuple[Kind, int], list[float]] = {}
        for span in timeline:
            times.setdefault((span.action.kind, span.action.stage), []).append(span.end - span.start)

        def mean(kind: Kind, stage: int) -> float:
            return fmean(times.get((kind, stage), [0.0]))

        stages = range(timeline.placement.num_stages)
        halves = tuple(mean(Kind.B, stage) / 2 for stage in stages)
        return cls(
            forward=tuple(mean(Kind.F, stage) for stage in stages),
            backward_input=tuple(half + mean(Kind.I, stage) for half, stage in zip(halves, stages, strict=True)),
            backward_weight=tuple(half + mean(Kind.W, stage) for half, stage in zip(halves, stages, strict=True)),
            latency=median(timeline.waits() or [0.0]),
        )

    def duration(self, kind: Kind, stage: int) -> float:
        """The time of a `kind` of action on `stage`. Raises UsageError for a stage without a cost."""
        if stage >= len(self.forward):
            raise UsageError(f"the cost model has {len(self.forward)} stages; stage {stage} has no cost")
        match kind:
            case Kind.F:
                return self.forward[stage]
            case Kind.B:
                return self.backward_input[stage] + self.backward_weight[stage]
            case Kind.I:
                return self.backward_input[stage]
            case Kind.W:
                return self.backward_weight[stage]

    def transfer(self, stage: int) -> float:
        """The time to move the activation of `stage`, or its gradient, to another rank."""
        return self.latency + (self.activation_bytes[stage] / self.bandwidth if self.activation_bytes else 0.0)
