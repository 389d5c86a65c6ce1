"""Breakdown: where the time of a planned step goes. Must not contain: how it is shown, and what work takes.

The computations of the busiest rank are told apart by what they would take without one kind of work after the other.
So a kind has the time that it adds: what hides behind other work adds nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pipeflow.core.action import Kind
from pipeflow.core.errors import UsageError
from pipeflow.planning.mesh import Mesh
from pipeflow.planning.physical import Physical, physical_costs
from pipeflow.planning.rates import KINDS
from pipeflow.planning.setup import Setup
from pipeflow.planning.step_plan import Plan

MEANINGS = {
    "products": "matrix products with weights",
    "attention": "products of queries, keys and values, and scores that are stored",
    "elementwise": "operations that the memory's bandwidth limits",
    "recomputation": "what backwards compute again",
    "launches": "waiting for the host to launch operations",
    "tensor": "communication of tensor ranks",
    "experts": "tokens on their way to experts and back",
    "context": "waiting for keys and values of other context ranks",
    "processors": "waiting for a processor that ranks share",
    "sharding": "gathers and reductions of divided weights and gradients",
    "transfer": "waiting for activations and gradients on their way",
    "bubble": "waiting for other stages",
    "reduction": "sums of gradients after the last backward",
    "optimizer": "the optimizer's step",
}
"""The parts of a breakdown, in their order."""
AROUND = (
    "sharding",
    "transfer",
    "bubble",
    "reduction",
    "optimizer",
)  # parts of a step besides what its busiest rank computes
LEAST = 1e-9  # parts under this share of a step are roundings
NOTED = 1e-4  # hidden time is told from this share on


@dataclass(frozen=True, slots=True)
class Breakdown:
    """The time of a step of a plan in parts, in seconds.

    Attributes:
        parts: by the names of MEANINGS, the time that each part adds to the step, without those that add nothing. Their
            sum is the step.
        hidden: by the same names, the time of communication that runs beside computations and adds nothing.
        rank: the pipeline rank whose computations are told apart: the busiest one.
    """

    parts: dict[str, float]
    hidden: dict[str, float]
    rank: int

    @property
    def seconds(self) -> float:
        """The time of the step."""
        return sum(self.parts.values())


def breakdown(found: Plan) -> Breakdown:
    """The parts of a plan's step. Raises UsageError for a plan without a cluster, whose times are not in seconds."""
    if found.cluster is None or found.step_parts is None or found.step_seconds is None:
        raise UsageError("a plan without a device has no seconds to break down: say which one, with --device")
    rank = min(found.ranks, key=lambda each: each.idle).rank
    runs = _runs(found, rank)
    hides = found.setup.overlaps and found.setup.zero < 3
    alone = replace(found.setup, zero=0, shard_ranks=None, overlap=hides)  # without hidden gathers
    costs = [_without(found, alone, KINDS[present:]) for present in range(len(KINDS) + 1)]
    computed = [_computed(each, runs) for each in costs]
    parts = {kind: computed[place + 1] - computed[place] for place, kind in enumerate(KINDS)}
    parts["recomputation"] += _again(found, rank)
    parts |= {name: seconds for name, seconds in found.step_parts._asdict().items() if name in AROUND}
    parts["processors"] = found.step_seconds - sum(parts.values())
    tiny = LEAST * found.step_seconds
    named = {name: parts[name] for name in MEANINGS if abs(parts.get(name, 0.0)) > tiny}
    hidden = _in_all(found, _without(found, found.setup, ()), runs, rank)
    beside = {
        name: all_ - parts[name] for name, all_ in hidden.items() if all_ - parts[name] > NOTED * found.step_seconds
    }
    return Breakdown(named, beside, rank)


def _without(found: Plan, setup: Setup, free: Sequence[str]) -> Physical:
    """The costs of a plan in a `setup`, if these kinds of work were free."""
    assert found.cluster is not None
    placement = found.schedule.placement
    mesh = Mesh.of(setup, placement.num_ranks, found.cluster.devices_per_node)
    return physical_costs(found.model, placement, setup, mesh, found.cluster, cut=found.cut, free=frozenset(free))


def _runs(found: Plan, rank: int) -> dict[int, float]:
    """Per stage of a rank, how many microbatches it computes, each counted as its factor."""
    factors, runs = found.cost.microbatch_factors, dict.fromkeys(found.schedule.placement.stages_of(rank), 0.0)
    for action in found.schedule.actions(rank):
        if action.kind is Kind.F:
            runs[action.stage] += factors[action.microbatch] if factors else 1
    return runs


def _computed(physical: Physical, runs: dict[int, float]) -> float:
    """The seconds in which a rank computes so many microbatches of its stages."""
    cost = physical.cost
    return sum(
        count * (cost.forward[stage] + cost.backward_input[stage] + cost.backward_weight[stage])
        for stage, count in runs.items()
    )


def _again(found: Plan, rank: int) -> float:
    """The seconds of forwards that the schedule computes again on a rank."""
    again = (each for each in found.schedule.actions(rank) if each.kind is Kind.C)
    factors = found.cost.microbatch_factors
    return sum(
        found.cost.durations[Kind.C][each.stage] * (factors[each.microbatch] if factors else 1) for each in again
    )


def _in_all(found: Plan, physical: Physical, runs: dict[int, float], rank: int) -> dict[str, float]:
    """The seconds of a rank's communication, hidden or not."""
    tensor = sum(count * physical.communication[stage] for stage, count in runs.items())
    return {"tensor": tensor, "reduction": sum(physical.cost.reduce[stage] for stage in runs) + physical.tied}
