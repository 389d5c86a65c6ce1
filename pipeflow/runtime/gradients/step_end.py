"""Gradients beyond their own rank: what is done with them, and in which order, to end a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from torch import nn

from pipeflow.core.placement import Placement
from pipeflow.parallel.context import Context
from pipeflow.parallel.sharding import partial_in
from pipeflow.parallel.transport.work import Work
from pipeflow.runtime.gradients.copies import Copies, Orders
from pipeflow.runtime.gradients.fully_sharded import is_fully_sharded, require_untied
from pipeflow.runtime.gradients.replicas import Replicas
from pipeflow.runtime.gradients.shared import Ties
from pipeflow.runtime.gradients.sums import Parts, in_buckets


class Gradients:
    """Copies of stages and tied weights are summed over their ranks, then parts over the tensor ranks, then all
    are averaged over the replicas. Two things begin before the end of the step, as soon as a stage's last backward is
    done: the exchange with the stage's other copy, and the average of the stage's own parameters, those of which this
    rank has the whole gradient by then: no other stage of it has them.
    """

    def __init__(self, stages: Mapping[int, nn.Module], ties: Ties, placement: Placement, context: Context) -> None:
        parts = [parameter for module in stages.values() for parameter in partial_in(module)]
        self._ties = ties
        self._parts = Parts(parts, context.tensor)
        self._copies = Copies(ties.copied, placement, context.transport)
        self._transport = context.transport
        self._replicas = Replicas(context.data)
        require_untied(p for module in stages.values() for p in module.parameters() if id(p) in ties.tied)
        held = {stage: list(filter(_is_averaged, module.parameters())) for stage, module in stages.items()}
        times_held = Counter(id(parameter) for parameters in held.values() for parameter in parameters)
        late = ties.tied | {id(parameter) for parameter in parts} | {key for key in times_held if times_held[key] > 1}
        self._own = {
            stage: in_buckets(parameter for parameter in parameters if id(parameter) not in late)
            for stage, parameters in held.items()
        }
        others = {id(p): p for parameters in held.values() for p in parameters if id(p) in late}
        self._others = in_buckets(others.values())

    def begin(self, orders: Orders) -> None:
        """Before the first backward of a step, whose ranks reduce their stages in `orders`."""
        self._parts.begin()  # first, as it ends last: what it sets aside is no part of any sum
        self._copies.begin(orders)
        self._ties.begin()

    def reduce(self, stage: int) -> list[Work]:
        """Starts what can begin for a stage of which all backwards are done."""
        return [*self._copies.start(stage), *self._replicas.start(self._own[stage])]

    def end(self, *, reduce: bool) -> None:
        """After the last backward; `reduce` unless each replica is to go on adding up its own. Raises LinkError."""
        self._copies.end()
        self._ties.end(self._transport)
        self._parts.end()
        if reduce:
            self._replicas.start(self._others)
        self._replicas.finish()

    def forget(self) -> None:
        """Drops what is under way."""
        self._copies.forget()
        self._replicas.forget()


def _is_averaged(parameter: nn.Parameter) -> bool:
    """Whether its gradient is averaged here."""
    return parameter.requires_grad and not is_fully_sharded(parameter)
