"""`pipeflow plan --cut`: how the layers of a model are dealt over the stages."""

from __future__ import annotations

import argparse
from itertools import accumulate, pairwise

from pipeflow.core.errors import UsageError
from pipeflow.core.partition import Cut
from pipeflow.core.placement import Placement
from pipeflow.core.schedule import Schedule
from pipeflow.planning.catalog import Model
from pipeflow.planning.cluster import Cluster
from pipeflow.planning.fastest_cut import fastest_cut
from pipeflow.planning.profiles import cut_by_cost
from pipeflow.planning.setup import Setup
from pipeflow.schedules import SCHEDULES, options_of

WORDS = ("even", "cost")


def add_cut(group: argparse._ArgumentGroup) -> None:
    """Adds the options that divide the layers."""
    cut = "layers per stage: even, cost (what makes the step shortest), or numbers such as 13,12,12,11 (default: even)"
    group.add_argument("--cut", type=cut_text, metavar="CUT", help=cut)
    for end in ("first", "last"):
        help_ = f"layers of the {end} pipeline rank; the others share the rest evenly"
        group.add_argument(f"--{end}-stage-layers", type=int, metavar="N", help=help_)


def ends_of(arguments: argparse.Namespace) -> tuple[int | None, int | None] | None:
    """The layers of the first and the last rank that were given; None without any. Raises UsageError for negative ones,
    and for another option that divides the layers.
    """
    ends = arguments.first_stage_layers, arguments.last_stage_layers
    if ends == (None, None):
        return None
    for name in ("cut", "layout"):
        if getattr(arguments, name):
            raise UsageError(f"--first-stage-layers and --last-stage-layers exclude --{name}: give one of them")
    if min(size for size in ends if size is not None) < 0:
        raise UsageError("--first-stage-layers and --last-stage-layers must be at least 0")
    return ends


def cut_text(text: str) -> str | tuple[int, ...]:
    """One of WORDS, or the numbers of layers. Raises ArgumentTypeError for anything else."""
    if text in WORDS:
        return text
    try:
        sizes = tuple(int(part) for part in text.split(","))
    except ValueError:
        sizes = ()
    if not sizes or min(sizes) < 0:
        raise argparse.ArgumentTypeError(
            f"it must be {' or '.join(WORDS)}, or one number of layers per stage such as 13,12,12,11; got {text!r}"
        )
    return sizes


def cut_of(
    given: str | tuple[int, ...] | None, model: Model, placement: Placement, setup: Setup, cluster: Cluster | None
) -> Cut:
    """The cut for the stages of a placement. Raises UsageError for another number of stages or of layers."""
    if given is None or given == "even":
        return "uniform"
    if isinstance(given, str):
        if placement.num_stages > model.layers:
            return "uniform"  # whose error says so
        return cut_by_cost(model, placement, setup, cluster)
    stages, layers = placement.num_stages, sum(given)
    if len(given) != stages:
        ranks = f", on {placement.num_ranks} ranks" if stages != placement.num_ranks else ""
        raise UsageError(f"--cut has {len(given)} stages, but the schedule has {stages}{ranks}: give {stages} numbers")
    if layers != model.layers:
        more = model.layers - layers
        change = f"add {more} to" if more > 0 else f"take {-more} from"
        raise UsageError(f"--cut has {layers} layers, but the model has {model.layers}: {change} its numbers")
    return list(pairwise(accumulate(given, initial=0)))


def cut_for(model: Model, schedule: Schedule, setup: Setup, cluster: Cluster, usual: Cut) -> Cut:
    """The cut with which the step of a schedule is shortest. `usual` stays if the order was made for it, and if there
    are more stages than layers.
    """
    is_made = schedule.name in SCHEDULES and "cost" in options_of(schedule.name)
    if is_made or schedule.placement.num_stages > model.layers:
        return usual
    return fastest_cut(model, schedule, setup, cluster)
