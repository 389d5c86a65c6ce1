"""Window: what every rank does in the selected range of time, or in the whole step."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from pipeflow.analysis.time_window import RankWindow
from pipeflow.analysis.time_window import window as ranks_in
from pipeflow.core.action import Kind
from pipeflow.core.dataflow import DATAFLOW
from pipeflow.core.text import percent
from pipeflow.core.timeline import Timeline
from pipeflow.draw.captions import heading
from pipeflow.draw.memory import amount_text, unit_of
from pipeflow.draw.page.tables import table
from pipeflow.draw.times import Unit
from pipeflow.explore.fields import CUSTOM
from pipeflow.explore.schedule_cache import drafted, timeline
from pipeflow.explore.state import State


def window(fields: Mapping[str, str]) -> dict[str, Any]:
    """A title, and a table per schedule, as HTML.

    Raises UsageError for fields that are wrong, and for a schedule that cannot be made or cannot run.
    """
    state = State.of(fields)
    drawn = [drafted(state).timeline if name == CUSTOM else timeline(state, name) for name in state.schedules]
    first, last = state.selected
    end = min(last, max(each.makespan for each in drawn))
    whole = first == 0 and math.isinf(last)
    part = "the whole step" if whole else f"{state.unit.text(first)} to {state.unit.text(end)}"
    return {"title": f"Ranks in {part}", "tables": "".join(_table(each, state) for each in drawn)}


def _table(timeline: Timeline, state: State) -> str:
    ranks = ranks_in(timeline, *state.selected)
    kinds = [kind for kind in Kind if any(kind in each.busy for each in ranks)]
    head = ("rank", *(DATAFLOW[kind].name for kind in kinds), "idle", "busy", f"peak {unit_of(timeline)}")
    lines = [[f"rank {rank}", *_line(timeline, each, kinds, state.unit)] for rank, each in enumerate(ranks)]
    if len(ranks) > 1:
        lines.append(["all ranks", *_line(timeline, _all(ranks), kinds, state.unit)])
    return table(heading(timeline), head, lines)


def _line(timeline: Timeline, rank: RankWindow, kinds: list[Kind], unit: Unit) -> Iterator[str]:
    yield from (unit.text(rank.busy.get(kind, 0.0)) for kind in kinds)
    yield unit.text(rank.idle)
    yield percent(rank.utilisation)
    yield amount_text(timeline, rank.peak)


def _all(ranks: tuple[RankWindow, ...]) -> RankWindow:
    """The sums over the ranks, the mean utilisation, and the highest peak."""
    busy = {kind: sum(each.busy.get(kind, 0.0) for each in ranks) for kind in Kind}
    computing, idle = (sum(getattr(each, name) for each in ranks) for name in ("computing", "idle"))
    mean = sum(each.utilisation for each in ranks) / len(ranks)
    return RankWindow(busy, computing, idle, mean, max(each.peak for each in ranks))
