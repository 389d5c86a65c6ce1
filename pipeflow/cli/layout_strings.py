"""`pipeflow plan --layout`: the stages of a plan as a string that Megatron-LM reads."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from pipeflow.core.errors import UsageError
from pipeflow.core.partition import Part
from pipeflow.core.placement import Placement
from pipeflow.planning.catalog import Model
from pipeflow.planning.layout_string import LayoutString
from pipeflow.planning.step_plan import Plan
from pipeflow.schedules import SCHEDULES, options_of


def add_layout_string(group: argparse._ArgumentGroup) -> None:
    """Adds the option. Without a value, it asks for the plan's own string."""
    help_ = (
        "layers per stage as in Megatron-LM's --pipeline-model-parallel-layout, such as 'Et*3|(tt|)*2,tL'; without a "
        "value: print the string of the layout"
    )
    group.add_argument("--layout", nargs="?", const="", metavar="STRING", help=help_)


def layout_of(arguments: argparse.Namespace) -> LayoutString | None:
    """The layout that was given. Raises UsageError for a string that is none, and for a cut beside it."""
    if not arguments.layout:
        return None
    if arguments.cut is not None:
        raise UsageError("--layout and --cut both divide the layers: give one of them")
    return LayoutString.read(arguments.layout)


def with_chunks(
    layout: LayoutString | None, name: str | None, ranks: int, options: dict[str, Any]
) -> tuple[str, dict[str, Any]]:
    """The name and the options of the schedule: without a name, 1F1B, which is interleaved for several stages per rank.
    Raises UsageError for stages that do not divide among the ranks.
    """
    if layout is None or ranks < 1:
        return name or "1f1b", options
    chunks = layout.chunks(ranks)
    name = name or ("1f1b" if chunks == 1 else "interleaved-1f1b")
    takes = name in SCHEDULES and "chunks" in options_of(name)
    return name, {"chunks": chunks, **options} if takes else options


def placed(layout: LayoutString, model: Model, placement: Placement) -> list[Part]:
    """The cut of the model. Raises UsageError unless the placement has stage i on rank i modulo its ranks, and as many
    stages, and as `LayoutString.cut`.
    """
    ranks, stages = placement.num_ranks, len(layout.stages)
    cut = layout.cut(model.layers)
    if layout.mtp != model.further_layers:
        raise UsageError(f"the layout has {layout.mtp} MTP layers ('m'), but the model has {model.further_layers}")
    if stages % ranks or placement != Placement.looped(ranks, stages // ranks):
        raise UsageError(
            f"the layout has {stages} stages, each on the rank of its number modulo {ranks}, but the schedule has "
            f"{placement.num_stages} stages on other ranks: leave out --schedule, or use --cut"
            if placement.num_stages == stages
            else f"the layout has {stages} stages, but the schedule has {placement.num_stages} on {ranks} ranks"
        )
    return cut


def said_layout(arguments: argparse.Namespace, found: Plan) -> Iterator[str]:
    """The line with the plan's own string, if it was asked for and is not printed anyway."""
    if arguments.layout is None or found.has_uneven_layout:
        return
    if found.layout_string is None:
        yield f"layout: no string, since {found.schedule.name} does not have stage i on rank i modulo its ranks"
    else:
        yield f"layout: {found.layout_string}"
