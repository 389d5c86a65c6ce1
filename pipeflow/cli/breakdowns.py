"""`pipeflow plan --breakdown`: where the time of a planned step goes, as a table, as a picture and for programs."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from pipeflow.core.errors import UsageError
from pipeflow.core.text import percent, seconds_text
from pipeflow.planning.breakdown import MEANINGS, Breakdown, breakdown
from pipeflow.planning.step_plan import Plan

if TYPE_CHECKING:
    from pipeflow.cli.options import Parser
    from pipeflow.draw import Table

LONGEST = 24  # letters of a bar in a terminal


def add_breakdown(command: Parser) -> None:
    """Adds the option --breakdown."""
    help_ = "where the time of a step goes, as a table; with --svg as a picture of stacked bars"
    command.add_argument("--breakdown", action="store_true", help=help_)


def require_seconds(arguments: argparse.Namespace) -> None:
    """Raises UsageError for --breakdown without a cluster, whose plan has no seconds."""
    if arguments.breakdown and arguments.device is None and arguments.cluster is None:
        raise UsageError("--breakdown tells where seconds go: say on which device, with --device or --cluster")


def for_programs(found: Plan) -> dict[str, Any] | None:
    """The breakdown as JSON has it; None for a plan without seconds."""
    return None if found.step_parts is None else asdict(breakdown(found))


def breakdown_table(found: Plan) -> Iterator[Table | str]:
    """The parts of one step with their shares, drawn as bars, and what each part is."""
    from pipeflow.draw import Table

    parts = breakdown(found)
    most = max(parts.parts.values())
    rows = [
        [
            name,
            seconds_text(seconds),
            percent(seconds / parts.seconds),
            seconds_text(parts.hidden[name]) if name in parts.hidden else "",
            ("#" * max(1, round(LONGEST * seconds / most))).ljust(LONGEST),
        ]
        for name, seconds in parts.parts.items()
    ]
    yield Table(["", "time", "share", "hidden" if parts.hidden else "", ""], rows)
    yield ""
    yield f"Of rank {parts.rank}, the busiest one; what runs beside computations is hidden and adds nothing."
    yield from (f"  {name}: {MEANINGS[name]}" for name in parts.parts)


def beside_each_other(found: Sequence[Plan]) -> Table:
    """The parts of several steps, a column for each."""
    from pipeflow.draw import Table

    every = [breakdown(each).parts for each in found]
    names = [name for name in MEANINGS if any(name in parts for parts in every)]
    rows = [[name, *(seconds_text(parts[name]) if name in parts else "-" for parts in every)] for name in names]
    return Table(["", *map(str, range(1, len(every) + 1))], rows)


def breakdown_svg(bars: Sequence[tuple[str, Breakdown]]) -> str:
    """The picture of named breakdowns, one below the other."""
    from pipeflow.draw import Bar, bars_svg

    return bars_svg(
        "Where the time of a step goes", [Bar(name, each.parts) for name, each in bars], [*MEANINGS], seconds_text
    )
