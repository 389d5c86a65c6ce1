"""Measure: everything that is measured on a machine, in the order in which every rank does it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType

from pipeflow.core.errors import UsageError
from pipeflow.engine.parallel.context import Context
from pipeflow.tools.calibration import computing, links
from pipeflow.tools.calibration.machine import device_name, memory_bytes, precisions, runs_ahead, sharing
from pipeflow.tools.calibration.machine_times import Measured
from pipeflow.tools.calibration.step_times import steps
from pipeflow.tools.calibration.stopwatch import Stopwatch

BUDGET: Mapping[str, float] = MappingProxyType(
    {
        "products": 0.14,
        "moved": 0.05,
        "attention": 0.05,
        "layers": 0.3,
        "launches": 0.04,
        "optimizer": 0.03,
        "sums": 0.13,
        "steps": 0.1,
        "gradients": 0.06,
        "transfers": 0.06,
        "host": 0.04,
    }
)
"""Shares of the time that measuring takes."""


def measure(
    context: Context,
    seconds: float,
    *,
    per_node: int | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Measured:
    """Measures the machine on which this world runs, in about `seconds` seconds. All ranks call it together, and it
    returns the same on all of them.

    Args:
        context: this rank's place.
        seconds: time to measure for.
        per_node: ranks in each node; by default LOCAL_WORLD_SIZE if it is set, otherwise all ranks.
        clock: seconds since any moment.

    One rank measures no links. Raises UsageError for ranks that do not divide into nodes of two or more.
    """
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", context.world_size)) if per_node is None else per_node
    alone = context.world_size == 1
    if not alone and (per_node < 2 or context.world_size % per_node):
        raise UsageError(
            f"{context.world_size} ranks with {per_node} in each node: links inside a node and between nodes are both "
            "measured, so start the same number on each node, 2 or more"
        )
    watch, known = Stopwatch(context, clock=clock), precisions(context.device)
    budget = {name: share * seconds for name, share in BUDGET.items()}
    main = known[0]
    launch = computing.launches(watch, main, budget["launches"])
    return Measured(
        device=device_name(context.device, per_node),
        memory_bytes=memory_bytes(context.device, per_node),
        devices_per_node=per_node,
        precision=main,
        products=tuple(computing.products(watch, known, budget["products"])),
        moved=tuple(computing.moved(watch, main, budget["moved"])),
        attention=tuple(computing.attention(watch, main, budget["attention"])),
        layers=tuple(computing.layers(watch, main, budget["layers"])),
        optimizer=tuple(computing.optimizer(watch, budget["optimizer"])),
        sums=()
        if alone
        else (
            *links.sums(watch, per_node, budget["sums"]),
            *links.gradient_sums(watch, per_node, budget["gradients"]),
        ),
        transfers=() if alone else tuple(links.transfers(watch, per_node, budget["transfers"])),
        steps=() if runs_ahead(context.device) else tuple(steps(watch, budget["steps"])),
        forward_launch=launch[0],
        backward_launch=launch[1],
        sync=0.0 if alone else links.sync_seconds(watch, per_node, budget["launches"] / 2),
        sharing=sharing(context.device, per_node),
        runs_ahead=runs_ahead(context.device),
        host=tuple(links.host_copies(watch, budget["host"])),
    )
