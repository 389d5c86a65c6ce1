"""Prices: the costs that the fields of a link give: by hand, of a model on a cluster, or of a measured step. Must not
contain: the prices of models, which are those of `planning`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, final

from pipeflow.core.analysis.measured_step import measured_costs
from pipeflow.core.cost import EVEN_NAMES, CostModel, costs_of, even_costs
from pipeflow.core.dataflow import Stream
from pipeflow.core.partition import Cut
from pipeflow.core.placement import Placement
from pipeflow.core.timeline import Timeline
from pipeflow.draw.captions import Unit
from pipeflow.planning.blocks import Transformer
from pipeflow.planning.catalog import model_named
from pipeflow.planning.cluster import Cluster
from pipeflow.planning.physical import stage_costs
from pipeflow.planning.schedule_request import ReadSchedule
from pipeflow.planning.setup import PRECISIONS, Setup
from pipeflow.planning.sharding import require_pipeline


@final
@dataclass(frozen=True, slots=True)
class ModelPrices:
    """The prices of a model in a layout: in seconds and bytes on a cluster, otherwise relative to a layer's forward.

    Attributes:
        model: its sizes.
        setup: the layout of a stage, and what is kept.
        cluster: the devices, if they are known.
        cut: gives the layers of each stage of a placement; None: as many for each.
    """

    model: Transformer
    setup: Setup
    cluster: Cluster | None
    cut: Callable[[Placement], Cut] | None = None

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> ModelPrices | None:
        """From the values of a link's fields; None if they name no model. Raises UsageError for values that do not fit
        each other.
        """
        if "model" not in values:
            return None
        names = ("tensor", "data", "microbatch_size", "checkpoint")
        setup = Setup(
            **{name: values[name] for name in names},
            precision=PRECISIONS[values["precision"]],
            zero=int(values["zero"]),
            sequence_parallel="sequence_parallel" in values,
        )
        numbers = ("devices_per_node", "link_bandwidth", "network_bandwidth")
        cluster = Cluster.of(values["device"], **{name: values.get(name) for name in numbers})
        return cls(model_named(values["model"]), setup, cluster)

    def cost_model(self, placement: Placement) -> CostModel:
        """The costs of the stages of `placement`. Raises UsageError for a model that cannot be laid out so."""
        return _model_costs(self, placement)


@lru_cache(64)
def _model_costs(prices: ModelPrices, placement: Placement) -> CostModel:
    model, setup, cluster = prices.model, prices.setup, prices.cluster
    cut: Cut = "uniform" if prices.cut is None else prices.cut(placement)
    if cluster is not None:
        require_pipeline(setup.zero, placement.num_ranks)
    return stage_costs(model, placement, setup, cluster, cut=cut)


@lru_cache(16)
def _measured_costs(read: ReadSchedule) -> CostModel:
    assert read.measured is not None  # a schedule has no costs
    return measured_costs(read.measured)


@final
@dataclass(frozen=True)
class LinkPrices:
    """The costs that the fields of a link give.

    Attributes:
        costs: those by hand, by the names of their fields.
        factors: relative times of equal parts of the model.
        modelled: the model that prices the schedules, instead of the costs.
        read: the file whose measured costs price the schedules, since no others are given.
    """

    costs: Mapping[str, float] = field(hash=False)
    factors: tuple[float, ...] = ()
    modelled: ModelPrices | None = None
    read: ReadSchedule | None = None

    @property
    def measured(self) -> Timeline | None:
        """The measured timeline whose costs these are, if they are."""
        return None if self.read is None else self.read.measured

    def cost_model(self, placement: Placement) -> CostModel:
        """The costs for the stages of `placement`. Raises UsageError for a model that does not fit them."""
        stages = placement.num_stages
        if self.read is not None:
            costs = _measured_costs(self.read)  # divided by depth for another number of stages
            times = {kind: spread(each, stages) for kind, each in costs.given.items()}
            return costs_of(times, latency=costs.latency, links=costs.links, unit=costs.unit)
        model = (self.modelled.cost_model if self.modelled else self._by_hand)(placement)
        if not self.factors:
            return model
        factors = [mean(self.factors, stage, stages) for stage in range(stages)]
        timed: dict[str, Any] = {
            name: tuple(factor * time for factor, time in zip(factors, getattr(model, name), strict=True))
            for name in ("forward", "backward_input", "backward_weight")
        }
        return replace(model, **timed)

    def _by_hand(self, placement: Placement) -> CostModel:
        model = even_costs(placement, {cost: self.costs[name] for name, cost in EVEN_NAMES.items()})
        if "bandwidth" not in self.costs:
            return model
        size = (self.costs["activation_bytes"],) * placement.num_stages
        return replace(model, activation_bytes=size, bandwidth=self.costs["bandwidth"])

    @property
    def reduces(self) -> bool:
        """Whether schedules reduce their weight gradients over replicas."""
        if self.modelled is not None:
            return self.modelled.setup.data > 1
        return bool(self.costs["reduce"]) or (self.read is not None and Stream.REDUCE in self.read.schedule.streams)

    @property
    def gathers(self) -> bool:
        """Whether schedules gather the weights of their stages, which replicas share out."""
        return self.modelled is not None and self.modelled.setup.zero == 3 and self.modelled.setup.data > 1

    @property
    def steps(self) -> bool:
        """Whether schedules have the optimizer's steps."""
        return self.modelled is None and bool(self.costs["optimizer"])

    def unit(self, ranks: int, microbatches: int) -> Unit:
        """The unit of times: a readable one for those of a model or of a measured step, which are in seconds. Others
        have none. It follows from the busiest stage, so that links can say times before anything is simulated.
        """
        if self.modelled is not None:
            cost = self.modelled.cost_model(Placement.linear(ranks))
            stages = zip(cost.forward, cost.backward_input, cost.backward_weight, strict=True)
            return Unit.readable(microbatches * max(map(sum, stages)))
        return Unit() if self.measured is None else Unit.of([self.measured])


def mean(numbers: Sequence[float], stage: int, stages: int) -> float:
    """The mean of the numbers of equal parts of a model over the part that a stage is.

    >>> [mean((1, 3), stage, 4) for stage in range(4)]
    [1.0, 1.0, 3.0, 3.0]
    """
    first, last = stage * len(numbers) / stages, (stage + 1) * len(numbers) / stages
    parts = [
        (min(last, index + 1) - max(first, index)) * numbers[index]
        for index in range(math.floor(first), min(math.ceil(last), len(numbers)))
    ]
    return sum(parts) / (last - first)


def spread(numbers: Sequence[float], stages: int) -> tuple[float, ...]:
    """Numbers per stage, divided among another number of stages by their depth; the sum stays.

    >>> spread((2, 6), 4), spread((1, 1, 3, 3), 2)
    ((1.0, 1.0, 3.0, 3.0), (2.0, 6.0))
    """
    if len(numbers) in (0, stages):
        return tuple(numbers)
    return tuple(mean(numbers, stage, stages) * len(numbers) / stages for stage in range(stages))
