"""The options of `pipeflow plan`: the sizes of a model, the cluster, what replicas divide, how layers are dealt over
stages, and the library that a layout is for.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from itertools import accumulate, pairwise
from typing import Any, Literal, get_args, get_origin, get_type_hints

from pipeflow.core.errors import UsageError
from pipeflow.core.partition import Cut, Part
from pipeflow.core.placement import Placement
from pipeflow.core.schedule import Schedule
from pipeflow.planning.catalog import Model, model_named
from pipeflow.planning.cluster import Cluster
from pipeflow.planning.cut_search import fastest_cut
from pipeflow.planning.device import DEVICES
from pipeflow.planning.engines import ENGINES
from pipeflow.planning.layout_string import LayoutString
from pipeflow.planning.libraries import LIBRARIES, Library, LibraryOptions
from pipeflow.planning.profiles import cut_by_cost
from pipeflow.planning.setup import ZERO, Setup
from pipeflow.planning.step_plan import Plan
from pipeflow.planning.transformer import GPT
from pipeflow.planning.vit import ViT
from pipeflow.schedules import SCHEDULES, options_of
from pipeflow.tools.cli.options import Parser, flag
from pipeflow.tools.cli.outputs import STANDARD_OUTPUT
from pipeflow.tools.cli.requests import refuse


def rate(text: str) -> float:
    """A number of bytes/s. Raises ArgumentTypeError for anything else, such as one with a unit."""
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"it must be a number in bytes/s, such as 25e9 for 25 GB/s or 200 Gbit/s; got {text!r}"
        ) from None


_NUMBERS: dict[str, tuple[Callable[[str], float], str, str]] = {
    "devices_per_node": (int, "N", "devices that share a node (default: 72 for gb200 and gb300, else 8)"),
    "link_bandwidth": (rate, "X", "bytes/s of a device inside a node, one way (default: the device's)"),
    "network_bandwidth": (rate, "X", "bytes/s of a device between nodes, one way (default: 25e9)"),
    "devices_per_nic": (int, "N", "devices that share a network card; a lone sender gets full bandwidth (default: 1)"),
}


def add_cluster(command: Parser) -> None:
    """The options; with one of --device and --cluster, times are in seconds."""
    group = command.add_argument_group("cluster", "gives times in seconds, with all communication")
    group.add_argument("--device", metavar="DEVICE", help=", ".join(DEVICES))
    group.add_argument("--cluster", metavar="FILE", help="a cluster file, which `pipeflow calibrate` writes")
    for name, (kind, metavar, help_) in _NUMBERS.items():
        group.add_argument(flag(name), type=kind, metavar=metavar, help=help_)


def cluster_of(arguments: argparse.Namespace) -> Cluster | None:
    """The cluster that the options describe; None where there are none. Raises UsageError for numbers without a device,
    and as Cluster.
    """
    given = {name: getattr(arguments, name) for name in _NUMBERS if getattr(arguments, name) is not None}
    if arguments.device is not None and arguments.cluster is not None:
        raise UsageError("--device and --cluster both say what the devices are: give one of them")
    if arguments.cluster is not None:
        return replace(Cluster.load(arguments.cluster), **given)
    if arguments.device is not None:
        return Cluster.of(arguments.device, **given)
    if given:
        verb = "describes" if len(given) == 1 else "describe"
        raise UsageError(f"{', '.join(map(flag, given))} {verb} a cluster: say of which devices, with --device")
    return None


def add_sharding(group: argparse._ArgumentGroup) -> None:
    """Adds the options to a group of a command."""
    add = group.add_argument
    zero = "split over the replicas: 1 (or no value) the optimizer's state, 2 gradients, too, 3 weights, too (FSDP)"
    add("--zero", type=int, choices=ZERO, nargs="?", const=1, help=f"{zero}; default: 0")
    shards = "split what --zero says over N replicas, such as those of a node, not over all of them"
    add("--shard-ranks", type=int, metavar="N", help=shards)
    prefetch = "with --zero 3, gather a layer while the backward before it computes"
    add("--prefetch", action="store_true", help=prefetch)
    once = "with --zero 3, keep gradients whole and reduce them once, not in every microbatch (no_sync)"
    add("--reduce-once", action="store_true", default=None, help=once)
    overlap = "reduce gradients and gather weights while layers compute (default: with --zero 3, in fp8 and *-mixed; "
    overlap += "a search tries it)"
    add("--overlap", action=argparse.BooleanOptionalAction, help=overlap)
    engine = "count what this program keeps, and compute as it does (default: as --for)"
    add("--engine", choices=ENGINES, help=engine)


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


SIZES = {name: get_type_hints(kind)[name] for kind in (GPT, ViT) for name in (each.name for each in fields(kind))}
MEANINGS = {  # help for sizes
    "layers": "number of transformer layers",
    "hidden": "hidden size",
    "heads": "number of attention heads",
    "kv_heads": "number of key and value heads",
    "head_size": "size of an attention head",
    "ffn": "size of the MLP, or of one expert",
    "gated": "MLPs with three matrices (SwiGLU)",
    "experts": "number of experts per layer",
    "experts_per_token": "number of experts that the router selects",
    "shared_experts": "number of experts that see every token",
    "biases": "linear layers of a block that have a bias",
    "norm": "LayerNorm or RMSNorm",
    "head_norms": "norms of query and key heads",
    "dropout": "keep masks of dropouts",
    "kv_rank": "size of the latent vector of key and value (MLA)",
    "q_rank": "size of the latent vector of the query (MLA)",
    "rope_size": "part of a head that has positions (MLA)",
    "value_size": "size of a head of value",
    "window": "tokens that a query sees",
    "full_every": "every N-th layer sees all tokens despite --window",
    "parallel_block": "attention and MLP read the same norm",
    "dense_layers": "number of first layers that have one MLP instead of experts",
    "dense_ffn": "size of that MLP",
    "expert_groups": "number of equal groups of experts",
    "groups_per_token": "number of groups whose experts a token uses",
    "mtp": "number of layers that predict further tokens",
    "positions": "most tokens per sequence",
    "vocabulary": "number of tokens in the vocabulary",
    "mlp_ratio": "size of the MLP, as a multiple of the hidden size",
    "tied": "the head shares the word table",
    "position_table": "learned positions, not rotary ones",
    "image": "height and width of an image, in pixels",
    "patch": "height and width of a patch, in pixels",
    "classes": "number of classes",
}


def add_sizes(command: Parser) -> None:
    """Adds an option for each size."""
    group = command.add_argument_group("model", "override sizes of MODEL")
    for name, kind in SIZES.items():
        if kind is bool:
            group.add_argument(flag(name), action=argparse.BooleanOptionalAction, help=MEANINGS.get(name))
        elif get_origin(kind) is Literal:
            group.add_argument(flag(name), choices=get_args(kind), help=MEANINGS.get(name))
        else:
            group.add_argument(flag(name), type=int, metavar="N", help=MEANINGS.get(name))


def model_of(arguments: argparse.Namespace) -> Model:
    """The model with the sizes that were given. Raises UsageError for sizes that it does not have."""
    given = {name: getattr(arguments, name) for name in SIZES if getattr(arguments, name) is not None}
    model, layout = model_named(arguments.model), layout_of(arguments)
    if layout is not None and layout.mtp and arguments.mtp is None:
        given["mtp"] = layout.mtp
    own = [each.name for each in fields(model)]
    if strange := [flag(name) for name in given if name not in own]:
        raise UsageError(f"{arguments.model} takes no {', '.join(strange)}; its sizes are {', '.join(map(flag, own))}")
    return replace(model, **given)


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


def add_library(command: Parser) -> None:
    """Adds the option that names the library."""
    help_ = "print the options of this library for the layout; for a search, for the best layout that it can run"
    command.add_argument("--for", dest="library", choices=LIBRARIES, help=help_)


def require_one_output(arguments: argparse.Namespace) -> None:
    """Raises UsageError for more than one of --for, --json and a plot for standard output."""
    given = {"--for": arguments.library, "--json": arguments.json, "--svg": arguments.svg == STANDARD_OUTPUT}
    names = [name for name, value in given.items() if value]
    if len(names) > 1:
        raise UsageError(f"standard output can take one output, not {' and '.join(names)}")
    if arguments.library is not None and arguments.svg is None:
        refuse(arguments, ("breakdown",), "with --for")


def print_options(arguments: argparse.Namespace, *found: Plan) -> None:
    """Prints the options for the first of these plans that the library can run, and on the error stream what they do
    not say. Raises UsageError if it can run none.
    """
    options, notes = _first(LIBRARIES[arguments.library], found)
    for note in (*notes, *options.notes):
        print(f"pipeflow: note: {note}", file=sys.stderr)
    print(options.text)


def _first(library: Library, found: Sequence[Plan]) -> tuple[LibraryOptions, list[str]]:
    """The options for the first plan that has any, and why the plans before it have none."""
    refused: list[str] = []
    for place, each in enumerate(found, start=1):
        try:
            return library.options(each), refused
        except UsageError as error:
            if len(found) == 1:
                raise
            refused.append(f"layout {place} is left out: {error}")
    raise UsageError(f"{library.name} can run none of the {len(found)} best layouts; {refused[0]}")


def schedules_of(arguments: argparse.Namespace, searched: tuple[str, ...]) -> tuple[str, ...]:
    """The schedules to search: of those `searched`, all or those that the library has."""
    if arguments.library is None:
        return searched
    return tuple(name for name in searched if name in LIBRARIES[arguments.library].schedules)
