"""fastest_cut: the layers of each stage with which a schedule's step is shortest. Must not contain: what layers cost,
and searches for other sizes.

Its candidates are the same for every cluster. So on a faster cluster, on which each of them is at least as fast, the
best of them is, too. A single cut by the costs of a cluster does not have this property: rounding may make it worse.
"""

from __future__ import annotations

from collections.abc import Iterator

from pipeflow.core.action import Kind
from pipeflow.core.partition import Part
from pipeflow.core.placement import Placement
from pipeflow.core.schedule import Schedule
from pipeflow.planning.blocks import Transformer
from pipeflow.planning.bounds import least_makespan
from pipeflow.planning.cluster import Cluster
from pipeflow.planning.cuts import cut_by_load, even_cut
from pipeflow.planning.mesh import Mesh
from pipeflow.planning.physical import Physical, physical_costs
from pipeflow.planning.setup import Setup

FIRST = (0.0, 0.5, 1.0, 2.0)  # layers that the part before them is worth
LAST = (0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0, 12.0)  # and the part after them


def cuts_to_try(layers: int, placement: Placement) -> Iterator[tuple[Part, ...]]:
    """Cuts for heads and embeddings of different weights, each once."""
    loads = (cut_by_load(layers, placement, first, last) for last in LAST for first in FIRST)
    yield from dict.fromkeys((even_cut(layers, placement.num_stages), *loads))


def fastest_cut(model: Transformer, schedule: Schedule, setup: Setup, cluster: Cluster) -> tuple[Part, ...]:
    """The one of `cuts_to_try` whose step is shortest; of several, the first. Raises UsageError as `physical_costs`."""
    placement = schedule.placement
    mesh = Mesh.of(setup, placement.num_ranks, cluster.devices_per_node)
    is_split = any(action.kind is Kind.W for rank in range(len(schedule.rows)) for action in schedule.actions(rank))
    reducing = schedule.with_reductions()

    def least(physical: Physical) -> float:
        return physical.after + least_makespan(physical.cost, placement, schedule.num_microbatches, split=is_split)

    costs = {
        cut: physical_costs(model, placement, setup, mesh, cluster, cut=cut)
        for cut in cuts_to_try(model.layers, placement)
    }
    best: tuple[float, tuple[Part, ...]] | None = None
    for bound, cut in sorted(((least(physical), cut) for cut, physical in costs.items()), key=lambda each: each[0]):
        if best is not None and bound >= best[0]:
            break
        seconds = costs[cut].after + costs[cut].timeline(reducing).makespan
        best = (seconds, cut) if best is None or seconds < best[0] else best
    assert best is not None
    return best[1]
