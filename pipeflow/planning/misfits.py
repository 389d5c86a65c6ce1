"""Misfits: the error for a model that fits in no layout: how much memory is missing, and which changes would make it
fit. Must not contain: times.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from typing import Any

from pipeflow.core.errors import UsageError
from pipeflow.core.text import bytes_text
from pipeflow.planning.layout import Layout, Wanted
from pipeflow.planning.layout_cells import Cell, leanest_cells
from pipeflow.planning.layout_trials import LayoutTrial, trials

MORE = (2, 4, 8, 16, 32, 64)  # times as many devices are tried


def no_room(wanted: Wanted) -> UsageError:
    """The error for a model that fits nowhere."""
    layout, least = smallest(wanted)
    missing = least - wanted.limit
    return UsageError(
        f"no layout fits: the closest one, {described(layout)}, needs {bytes_text(least)} on its fullest device, "
        f"which is {bytes_text(missing)} more than the limit of {bytes_text(wanted.limit)}; {_advice(wanted)}"
    )


def described(layout: Layout) -> str:
    """The layout in a few words."""
    kept = {
        "none": "without recomputation",
        "selective": "recomputing scores",
        "op": "recomputing every other product",
        "full": "recomputing layers",
    }
    zero = f", ZeRO-{layout.zero}" if layout.zero else ""
    further = {"context": layout.context, "expert": layout.expert}
    others = "".join(f" x {name} {ranks}" for name, ranks in further.items() if ranks > 1)
    sizes = f"tensor {layout.tensor} x pipeline {layout.pipeline} x data {layout.data}{others}"
    return (
        f"{sizes} with {layout.schedule} and microbatches of {layout.microbatch_size}, {kept[layout.checkpoint]}{zero}"
    )


def smallest(wanted: Wanted, enough: float = 0.0) -> tuple[Layout, float]:
    """The layout whose fullest device needs the fewest bytes, and these bytes. The search ends at the first layout that
    needs at most `enough`.
    """
    number = count()
    heap: list[tuple[float, int, Cell | LayoutTrial]] = [
        (_least(wanted, cell), next(number), cell) for cell in leanest_cells(wanted)
    ]
    heapq.heapify(heap)
    best: tuple[Layout, float] | None = None
    while heap and (best is None or heap[0][0] < best[1]):
        _, _, node = heapq.heappop(heap)
        if isinstance(node, LayoutTrial):
            needed = node.peak_bytes() if node.least_bytes() < (best[1] if best else float("inf")) else float("inf")
            if best is None or needed < best[1]:
                best = node.layout, needed
                if needed <= enough:
                    break
        else:
            for _, trial in trials(wanted, node, best[1] if best else float("inf")):
                heapq.heappush(heap, (max(trial.state), next(number), trial))
    if best is None:
        raise UsageError(_undivided(wanted))
    return best


def _undivided(wanted: Wanted) -> str:
    """The error for expert ranks or shards that divide no layout."""
    if wanted.expert is not None or wanted.expert_tensor is not None:
        free = (cell.setup.expert for cell in leanest_cells(replace(wanted, expert=None, expert_tensor=None)))
        asked = f"{wanted.expert or 1} expert ranks of {wanted.expert_tensor or 1} devices"
        works = " or ".join(map(str, sorted(set(free))))
        return f"{asked} divide no stage of {wanted.devices} devices: expert {works} works"
    return f"no layout has replicas in groups of shard_ranks={wanted.shard_ranks}: leave other sizes open"


def _least(wanted: Wanted, cell: Cell) -> float:
    """A lower bound on the bytes of the fullest device of a cell: its share of the weights, gradients and optimizer."""
    setup, precision = cell.setup, cell.setup.precision
    weight, gradient = (
        of / (setup.shards if setup.zero > least else 1)
        for of, least in ((precision.weight, 2), (precision.gradient, 1))
    )
    model, states = wanted.model, precision.master + precision.moments
    routed = (model.layers - model.dense_layers) * model.expert_parameters(1, 1)
    others = (model.parameters - routed) / (setup.tensor * cell.pipeline)
    own = routed / (setup.expert * setup.expert_split * cell.pipeline)
    divided = others * states / setup.shards + own * states / setup.expert_shards
    return (others + own) * (weight + gradient) + divided


def _advice(wanted: Wanted) -> str:
    """The changes, each alone, with which a layout fits."""
    found = [words for words, change in _changes(wanted) if _fits(replace(wanted, **change))]
    more = next((times for times in MORE if _fits(_with_devices(wanted, times))), None)
    if more is not None:
        found.append(f"{wanted.devices * more} devices")
    return (
        f"it fits with {', or with '.join(found)}" if found else "it needs devices with more memory, or a smaller model"
    )


def _changes(wanted: Wanted) -> Iterator[tuple[str, dict[str, Any]]]:
    given = {
        "checkpoint": "recomputation",
        "zero": "ZeRO-1",
        "tensor": "another number of tensor ranks",
        "pipeline": "another number of pipeline ranks",
        "context": "another number of context ranks",
        "expert": "another number of expert ranks",
        "microbatch_size": "smaller microbatches",
    }
    yield from ((words, {name: None}) for name, words in given.items() if getattr(wanted, name) is not None)
    if wanted.sequence_parallel is False:
        yield "sequence parallelism", {"sequence_parallel": None}


def _with_devices(wanted: Wanted, times: int) -> Wanted:
    return replace(wanted, devices=wanted.devices * times)


def _fits(wanted: Wanted) -> bool:
    try:
        return smallest(wanted, wanted.limit)[1] <= wanted.limit
    except UsageError:  # nothing divides
        return False
