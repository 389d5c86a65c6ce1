"""CostModel: how long actions and transfers take. Any unit of time, the same throughout."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from pipeflow.core.action import Kind
from pipeflow.core.dataflow import DATAFLOW, Content
from pipeflow.core.errors import UsageError
from pipeflow.core.placement import Placement
from pipeflow.core.route import Route, routes_among

LARGEST = 1e100  # of a cost: the sum over any number of actions is finite, too
SMALLEST = 1e-100  # of one that is not 0: a part of any other is a number, too


class Link(NamedTuple):
    """How values pass from one rank to another: `latency` in time, `bandwidth` in bytes per time."""

    latency: float = 0.0
    bandwidth: float = math.inf


@dataclass(frozen=True, slots=True)
class CostModel:
    """Per stage, the time of a forward and of the two halves of a backward; the time of a transfer; and memory.

    A full backward takes both halves. A value that moves between two ranks holds their link for
    `activation_bytes[stage] / bandwidth` (its stage's activation, or the gradient of that, of the same size), and
    arrives a `latency` after that; `links` has the ordered pairs of ranks (from, to) that differ. Of a pair, `overlap`
    is the part of the shorter half that the longer one hides: 0, the pair takes the sum of both; 1, only the longer
    one's time. `route_bytes` has the bytes of what passes on routes, by (from stage, to stage).

    Per stage, a forward keeps `saved_bytes` for its backward; between its two halves a backward keeps `deferred_bytes`.
    Per stage, reducing its weight gradients over the ranks that hold it takes `reduce`, once per step; empty, nothing.
    `times` has those of kinds of action for which there is no argument here, `kept_bytes` those of what else is kept.

    Raises UsageError for tuples of different lengths, for routes that are none, and for numbers that are negative, not
    finite, or beyond `SMALLEST` and `LARGEST`.
    """

    forward: tuple[float, ...]
    backward_input: tuple[float, ...]
    backward_weight: tuple[float, ...]
    latency: float = 0.0
    bandwidth: float = math.inf
    activation_bytes: tuple[float, ...] = ()
    links: Mapping[tuple[int, int], Link] = field(default_factory=dict, hash=False)
    overlap: float = 0.0
    saved_bytes: tuple[float, ...] = ()
    deferred_bytes: tuple[float, ...] = ()
    reduce: tuple[float, ...] = ()
    times: Mapping[Kind, tuple[float, ...]] = field(default_factory=dict, hash=False)
    kept_bytes: Mapping[Content, tuple[float, ...]] = field(default_factory=dict, hash=False)
    route_bytes: Mapping[tuple[int, int], float] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        stages = len(self.forward)
        for name, numbers in self._per_stage():
            if len(numbers) != stages:
                raise UsageError(f"costs are per stage: {name} has {len(numbers)} of them, forward {stages}")
            for stage, number in enumerate(numbers):
                _require_cost(f"{name} of stage {stage}", number)
        for route, number in self.route_bytes.items():
            _require_cost(f"route_bytes of {tuple(route)}", number)
        routes_among(stages, self.route_bytes)
        for link in (Link(self.latency, self.bandwidth), *self.links.values()):
            _require_cost("latency", link.latency)
            if not link.bandwidth >= SMALLEST:
                raise UsageError(f"bandwidth must be positive, at least {SMALLEST:g}, got {link.bandwidth}")
        if not 0 <= self.overlap <= 1:
            raise UsageError(f"overlap is a part of the shorter half, from 0 to 1, got {self.overlap}")

    def _per_stage(self) -> Iterator[tuple[str, tuple[float, ...]]]:
        """What there are numbers of for each stage, by its name."""
        for name in ("forward", "backward_input", "backward_weight"):
            yield name, getattr(self, name)
        for name in ("activation_bytes", "saved_bytes", "deferred_bytes", "reduce"):
            if numbers := getattr(self, name):
                yield name, numbers
        for kind, numbers in self.times.items():
            yield f"times of {kind}", numbers
        for content, numbers in self.kept_bytes.items():
            yield f"kept_bytes of {content}", numbers

    @classmethod
    def even(
        cls,
        placement: Placement,
        forward: float = 1,
        backward_input: float = 1,
        backward_weight: float = 1,
        transfer: float = 0,
        *,
        saved_bytes: float = 0,
        deferred_bytes: float = 0,
        overlap: float = 0,
        reduce: float = 0,
    ) -> CostModel:
        """The costs of one microbatch on one rank's whole share of the model, divided evenly among its
        chunks, so that schedules with and without chunks compare; `reduce` is that of the share's weight gradients.
        """
        stages, share = placement.num_stages, placement.chunks_per_rank

        def divided(whole: float) -> tuple[float, ...]:
            return (whole / share,) * stages

        return cls(
            forward=divided(forward),
            backward_input=divided(backward_input),
            backward_weight=divided(backward_weight),
            latency=transfer,
            overlap=overlap,
            saved_bytes=divided(saved_bytes) if saved_bytes else (),
            deferred_bytes=divided(deferred_bytes) if deferred_bytes else (),
            reduce=divided(reduce) if reduce else (),
        )

    def duration(self, kind: Kind, stage: int) -> float:
        """The time of a `kind` of action on `stage`. Raises UsageError for a stage without a cost."""
        if stage >= len(self.forward):
            raise UsageError(f"the cost model has {len(self.forward)} stages; stage {stage} has no cost")
        parts: list[tuple[float, ...]] = [getattr(self, name) for name in DATAFLOW[kind].takes]
        return sum((part[stage] for part in parts or [self.times.get(kind, ())] if part), 0.0)

    def pair(self, forward: int, backward: Kind, stage: int) -> float:
        """The time of a forward on stage `forward` overlapped with a `backward` (B or I) on `stage`."""
        one, other = self.duration(Kind.F, forward), self.duration(backward, stage)
        return one + other - self.overlap * min(one, other)

    def link(self, sender: int | None = None, receiver: int | None = None) -> Link:
        """What connects rank `sender` to rank `receiver`."""
        usual = Link(self.latency, self.bandwidth)
        return usual if sender is None or receiver is None else self.links.get((sender, receiver), usual)

    def holding(
        self, stage: int, sender: int | None = None, receiver: int | None = None, route: Route | None = None
    ) -> float:
        """For how long the activation of `stage`, or its gradient, holds the link from `sender` to `receiver`; with a
        `route`, what passes on that.
        """
        if route is None and not self.activation_bytes:
            return 0.0
        size = self.activation_bytes[stage] if route is None else self.route_bytes[route]
        return size / self.link(sender, receiver).bandwidth

    def transfer(self, stage: int, sender: int | None = None, receiver: int | None = None) -> float:
        """The time to move the activation of `stage`, or its gradient, from rank `sender` to rank `receiver`, when
        nothing else is on its way.
        """
        return self.link(sender, receiver).latency + self.holding(stage, sender, receiver)


def _require_cost(what: str, number: float) -> None:
    if not (math.isfinite(number) and number >= 0):
        raise UsageError(f"{what} must be finite and not negative, got {number}")
    if number and not SMALLEST <= number <= LARGEST:
        raise UsageError(f"{what} must be 0, or from {SMALLEST:g} to {LARGEST:g}, got {number}")
