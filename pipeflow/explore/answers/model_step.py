"""Model: what a step of a model takes on its devices, under each schedule that is shown: the parts of its time, and the
memory of each rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pipeflow.core.text import bytes_text, number, percent
from pipeflow.draw.captions import heading
from pipeflow.draw.page.tables import table
from pipeflow.explore.memory_fit import above_device
from pipeflow.explore.schedule_cache import schedule
from pipeflow.explore.state import State
from pipeflow.planning.omissions import unpriced
from pipeflow.planning.rank_memory import RankPlan
from pipeflow.planning.step_plan import Plan

MEMORY = {
    "weights": ("weights",),
    "gradients": ("gradients",),
    "optimizer": ("optimizer",),
    "activations": ("activations", "recomputed", "transfers"),
    "gathered": ("gathered",),
    "other": ("backward", "buffers", "step"),
    "allocator": ("allocator",),
}
"""The columns of a device's memory: each adds up some of `RankPlan.peak_parts`."""
PARTS = ("compute", "tensor", "sharding", "bubble", "transfer", "reduction", "optimizer")


def model(fields: Mapping[str, str]) -> dict[str, Any]:
    """Tables of step times and of memory, as HTML, and for each schedule the ranks that do not fit on their device, or
    None; no tables without a model.

    Raises UsageError for fields that are wrong, and for a schedule that cannot be made or cannot run.
    """
    state = State.of(fields)
    if state.modelled is None:
        return {"tables": "", "misfits": []}
    plans = [state.modelled.plan(schedule(state, name).without_reductions()) for name in state.schedules]
    memory = state.modelled.cluster.usable_bytes
    device = state.modelled.cluster.device.name
    tables = [_times(plans, device), *(_memory(each, memory) for each in plans)]
    return {"tables": "".join(tables), "misfits": [above_device(each, memory, device) for each in plans]}


def _times(plans: list[Plan], device: str) -> str:
    head = ("step", "seconds", *PARTS, "tokens/s")
    caption = f"Time of a step on {plans[0].devices} x {device}, by what it is made of"
    if missing := unpriced(plans[0].model, plans[0].setup):
        caption += f"; not priced: {'; '.join(missing)}"
    return table(caption, head, [[*_time(each)] for each in plans])


def _time(plan: Plan) -> Iterator[str]:
    parts, seconds = plan.step_parts, plan.step_seconds or 0.0
    yield heading(plan.timeline)
    yield number(seconds)
    for part in PARTS:
        yield percent(getattr(parts, part) / seconds)
    yield f"{plan.tokens_per_second or 0.0:,.0f}"


def _memory(plan: Plan, memory: float) -> str:
    memory -= plan.outside_bytes
    head = ("rank", "layers", *MEMORY, "sum", f"of {bytes_text(memory)}")
    caption = f"Memory of a device, {heading(plan.timeline)}"
    return table(caption, head, [[*_rank(each, memory)] for each in plan.ranks])


def _rank(rank: RankPlan, memory: float) -> Iterator[str]:
    yield f"rank {rank.rank}"
    yield str(rank.layers)
    for parts in MEMORY.values():
        yield bytes_text(sum(rank.peak_parts[part] for part in parts))
    yield bytes_text(rank.peak_bytes)
    yield "fits" if rank.peak_bytes <= memory else f"{bytes_text(rank.peak_bytes - memory)} too much"
