"""Compare: all schedules under the sizes and costs of a state, as a plot of bubble against peak memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipeflow.analysis.measures import Measures
from pipeflow.core.errors import UsageError
from pipeflow.draw.columns import COLUMNS, grouped, plot
from pipeflow.draw.files.svg_scatter import scatter_svg
from pipeflow.explore.limits import require_size
from pipeflow.explore.schedule_cache import measures
from pipeflow.explore.state import State
from pipeflow.explore.turns import TURNS
from pipeflow.schedules.registry import COMPARED, is_searched

CANDIDATES = 20  # orders that a search tries for the plot
LARGEST = 8_192  # stages times microbatches of each schedule, so that all of them take seconds at most
WIDEST = 960  # pixels


def compare(fields: Mapping[str, str]) -> dict[str, Any]:
    """The plot as SVG, the measures of the schedules that are in it, and lines about the others.

    A search that is not shown ends early, and a line says so. Raises UsageError for fields that are wrong.
    """
    state = State.of(fields)
    found, refused = measured(state)
    notes = [
        f"{name}: the best of {CANDIDATES} orders; choose it to search longer" for name in found if _short(state, name)
    ]
    notes += [f"left out: {line}" for line in grouped(refused)]
    width = min(int(fields.get("width") or WIDEST), WIDEST)
    return {
        "plot": scatter_svg(*plot(found), width=width, marked=state.schedules) if found else "",
        "notes": notes,
        "measures": {
            name: {
                "said": _said(each),
                "bubble": each.makespan_bubble_ratio,
                "makespan": each.makespan,
                "activations": each.peak_activations,
                "bytes": each.peak_bytes,
            }
            for name, each in found.items()
        },
    }


def measured(state: State) -> tuple[dict[str, Measures], dict[str, str]]:
    """The measures of every schedule that is compared and of all that is shown, and for those that cannot be made in
    this size the reason.
    """
    found, refused = {}, {}
    for name in dict.fromkeys([*COMPARED, *state.schedules]):
        TURNS.wait()
        candidates = CANDIDATES if _short(state, name) else None
        try:
            if name not in state.schedules:
                require_size(state.families([name]), state.ranks, state.microbatches, LARGEST)
            found[name] = measures(state, name, candidates)
        except UsageError as error:
            refused[name] = " ".join(str(error).split())
    return found, refused


def _short(state: State, name: str) -> bool:
    return is_searched(name) and name not in state.schedules


def _said(measures: Measures) -> str:
    """The two coordinates of a point in words."""
    kept = COLUMNS["activations" if measures.peak_bytes is None else "bytes"]
    return ", ".join(f"{' '.join(each.title.split())} {each.cell(measures)}" for each in (COLUMNS["bubble"], kept))
