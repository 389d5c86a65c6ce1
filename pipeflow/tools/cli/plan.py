"""`pipeflow plan`: one layout of a model, the best layouts for a number of devices, or what other schedules would gain
for a measured step. Must not contain: what is printed of them.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, get_type_hints

from pipeflow.core.errors import UsageError
from pipeflow.core.partition import Cut
from pipeflow.core.placement import Placement
from pipeflow.core.schedule import Schedule
from pipeflow.core.timeline import Timeline
from pipeflow.planning.catalog import MODELS, Model, model_named
from pipeflow.planning.cluster import Cluster
from pipeflow.planning.configs import FAMILIES, model_in
from pipeflow.planning.cuts import cut_by_cost, cut_with_ends, fastest_cut
from pipeflow.planning.estimate import plan
from pipeflow.planning.layer_kinds import expert_layers_in
from pipeflow.planning.layout import GIVEN, SEARCHED, Wanted
from pipeflow.planning.layout_string import LayoutString
from pipeflow.planning.layouts import faster_on_fewer, find_layouts
from pipeflow.planning.libraries import LIBRARIES
from pipeflow.planning.libraries.library import stages_per_rank
from pipeflow.planning.replanning import replan
from pipeflow.planning.schedule_request import ScheduleRequest
from pipeflow.planning.setup import CHOICES, PRECISIONS, Setup
from pipeflow.planning.transformer import GPT, ViT
from pipeflow.schedules import SCHEDULES, options_of
from pipeflow.schedules.orders.additions import STAGE_OPTIONS
from pipeflow.schedules.registry import family_options
from pipeflow.tools.cli import layout_reports
from pipeflow.tools.cli import plan_reports as reports
from pipeflow.tools.cli.options import (
    Commands,
    Parser,
    add_family_options,
    add_fields,
    argument,
    flag,
    schedule_name,
    values_of,
)
from pipeflow.tools.cli.outputs import STANDARD_OUTPUT, doing, show, write
from pipeflow.tools.cli.plan_cluster import add_cluster, cluster_of
from pipeflow.tools.cli.plan_use import Planned, print_options, use_lines
from pipeflow.tools.cli.requests import (
    GivenCosts,
    changed,
    is_file,
    read_as,
    refuse,
    refuse_all_but,
    request_of,
    require_size,
    sound_schedule,
)
from pipeflow.tools.explore.prices import ModelPrices

DESCRIPTION = """\
Plans the training of a model before anything runs: one layout, or with --devices the best ones. Needs no GPU.
"""
EXAMPLES = """\
examples:
  the best layouts for a number of devices and a batch, within their memory:
    pipeflow plan llama3-8b --devices 16 --batch 128 --device h100-80gb
  one layout, in seconds; --json for programs:
    pipeflow plan gpt3-175b --pipeline 8 --tensor 8 --data 8 --microbatches 64 --device a100-80gb
  other sizes, recomputation, layers balanced by what they take:
    pipeflow plan gpt3-1.3b --layers 32 --checkpoint full --cut cost --device a100-40gb
  the stages of a Megatron-LM layout string:
    pipeflow plan llama3-70b --pipeline 8 --layout 'Et*2|(t*2|)*34,t*3|(t*2|)*3,tL'
  a cluster that was measured, or slower links than usual:
    pipeflow plan gpt2-xl --pipeline 4 --cluster cluster.json
    pipeflow plan gpt2-xl --pipeline 16 --device v100-32gb --precision fp16 --network-bandwidth 1.25e9
  where the time of a step goes, as a table and as a picture:
    pipeflow plan llama3-8b --pipeline 4 --device h100 --breakdown --svg step.svg
  after a step was measured: what other schedules would gain:
    pipeflow plan --measured run.json
"""
MOST_LAYERLESS = 1_000  # ranks without layers: of fewer, the plan says more than that there are too many
MOST_SEQUENCES = 2_000  # of a step, for each device: a search simulates thousands of such steps
MOST_DEVICES = 2**18  # of a search: it simulates thousands of layouts, and more devices only add replicas
REPLAN = ("measured", "csv", "json")  # what a replan reads
SEARCH = ("batch", "memory", "top")  # what only a search reads
CHOSEN = ("checkpoint", "zero", "sequence_parallel", "overlap", "context_kind", "shard_ranks")
FIXED = (*GIVEN, *CHOSEN)  # the same in all layouts of a search
REFUSED = {  # options that a search does not take, and why
    "data": "it follows from the other sizes",
    "microbatches": "they follow from --batch",
    "reduce_once": "it is slower or needs more memory than what a search finds with --zero 1 or 3",
    "flops": "times are those of --device",
    "cut": "cuts are searched, too",
    "layout": "cuts are searched, too",
    "first_stage_layers": "cuts are searched, too",
    "last_stage_layers": "cuts are searched, too",
    "imbalance": "it follows from the number of expert ranks",
    "checkpoint_layers": "layouts recompute all layers or none",
}
EXPERTS = ("expert_tensor", "dispatcher", "overlap_experts")
LAYOUT = tuple(each.name for each in fields(Setup))
SIZES = {each.name: kind for kind in (ViT, GPT) for each in fields(kind)}


def add_plan(commands: Commands) -> None:
    """Adds the command and its options."""
    command = commands.add_parser(
        "plan",
        help="estimate memory per rank, step time and bubble of a model",
        description=DESCRIPTION,
        epilog=EXAMPLES,
    )
    add = command.add_argument
    help_ = f"config.json of a model of transformers ({', '.join(FAMILIES)}), or one of {', '.join(MODELS)}"
    add("model", metavar="MODEL", nargs="?", help=help_)
    group = command.add_argument_group("model", "override sizes of MODEL")
    for kind in (GPT, ViT):
        own = [name for name, whose in SIZES.items() if whose is kind]
        add_fields(group, kind, own, readers={"expert_layers": expert_layers_in})
    _add_schedule(command)
    _add_layout(command)
    _add_search(command)
    add_cluster(command)
    add("--flops", type=float, metavar="X", help="FLOP/s of one device; gives times in seconds without communication")
    add("--json", action="store_true", help="print JSON")
    help_ = "print where the time of a step goes, as a table; with --svg as a picture of stacked bars"
    add("--breakdown", action="store_true", help=help_)
    help_ = "print the options of this library for the layout, or for the best layout that it can run; the plan counts "
    help_ += "what the library keeps, unless --engine says otherwise"
    add("--for", dest="library", choices=LIBRARIES, help=help_)
    add = command.add_argument_group("replanning", "instead of MODEL, after a step was measured").add_argument
    add("--measured", metavar="FILE", help="timeline of a traced step (JSON): compare schedules under its costs")
    add("--csv", metavar="FILE", help="write the fastest schedule within the same memory as CSV")
    command.set_defaults(run=run)


def _add_schedule(command: Parser) -> None:
    group = command.add_argument_group("schedule")
    help_ = "a name from `pipeflow list`, or a file"
    group.add_argument("--schedule", type=schedule_name, metavar="SCHEDULE", help=f"{help_} (default: 1f1b)")
    group.add_argument("--pipeline", type=int, metavar="P", help="number of pipeline ranks (default: 4)")
    group.add_argument("--microbatches", type=int, metavar="M", help="number of microbatches per replica (default: 8)")
    add_family_options(group)


def _add_layout(command: Parser) -> None:
    """Adds an option for each field of `Setup`, and those that divide the layers."""
    group = command.add_argument_group("layout")
    switches = {name for name, hint in get_type_hints(Setup).items() if hint is bool} - {*FIXED}
    alone = {"zero": 1, "checkpoint": "full", "offload_optimizer": 1.0}
    add_fields(group, Setup, LAYOUT, choices=CHOICES, alone=alone, switches=switches, usual=Setup())
    add = group.add_argument
    help_ = (
        "layers per stage: even, cost (what makes the step shortest), or numbers such as 13,12,12,11 (default: even)"
    )
    add("--cut", type=argument(cut_in), metavar="CUT", help=help_)
    for end in ("first", "last"):
        help_ = f"layers of the {end} pipeline rank; the others share the rest evenly"
        add(f"--{end}-stage-layers", type=int, metavar="N", help=help_)
    help_ = (
        "layers per stage as in Megatron-LM's --pipeline-model-parallel-layout, such as 'Et*3|(tt|)*2,tL'; without a "
    )
    help_ += "value: print the string of the layout"
    add("--layout", type=argument(_layout_in), nargs="?", const="", metavar="STRING", help=help_)


def _add_search(command: Parser) -> None:
    add = command.add_argument_group(
        "search", "the best layouts, ranked; layout options that are given stay fixed"
    ).add_argument
    add("--devices", type=int, metavar="N", help="number of devices: search for their best layouts")
    add("--batch", type=int, metavar="B", help="sequences per step, on all devices together")
    limit = "memory of a device that may be used, such as 80GiB or 80e9 (default: what the device has for tensors)"
    add("--memory", type=argument(memory_size), metavar="BYTES", help=limit)
    add("--top", type=int, metavar="K", help="number of layouts to list (default: 5)")
    add("--svg", metavar="FILE", help="write a plot of step time against memory as SVG, or with --breakdown bars")


UNITS = {"": 1, "b": 1} | {
    prefix + unit: base**power
    for power, prefix in enumerate("kmgt", start=1)
    for unit, base in (("b", 1000), ("ib", 1024))
}
LEAST = 1e6  # bytes of memory: less must be a number of GB without its unit


def memory_size(text: str) -> float:
    """A number of bytes with or without a unit: 80GiB, 80GB, 80e9."""
    match = re.fullmatch(r"([0-9.]+(?:e[+-]?[0-9]+)?)\s*([a-z]*)", text.strip().lower())
    try:
        size = float(match[1]) * UNITS[match[2]] if match else float("nan")
    except (ValueError, KeyError):
        size = float("nan")
    if not LEAST <= size < float("inf"):
        raise UsageError(f"it must be a size such as 80GiB, 80GB or 80e9, got {text!r}")
    return size


def cut_in(text: str) -> str | tuple[int, ...]:
    """One of "even" and "cost", or the numbers of layers. Raises UsageError for anything else."""
    if text in ("even", "cost"):
        return text
    try:
        sizes = tuple(map(int, text.split(",")))
    except ValueError:
        sizes = ()
    if not sizes or min(sizes) < 0:
        raise UsageError(
            f"it must be even or cost, or one number of layers per stage such as 13,12,12,11; got {text!r}"
        )
    return sizes


def _layout_in(text: str) -> LayoutString | str:
    """The layout that a string describes; empty: the plan's own is asked for."""
    return text and LayoutString.read(text)


def run(arguments: argparse.Namespace) -> int:
    """Prints the plan of one layout, the best layouts, or what other schedules would gain."""
    if arguments.measured is not None:
        refuse_all_but(arguments, REPLAN, "with --measured, which has no model and reads --csv and --json alone")
        return _run_replan(arguments)
    refuse(arguments, ("csv",), "without --measured")
    if arguments.model is None:
        raise UsageError(f"say which model: pipeflow plan MODEL, with one of {', '.join(MODELS)}")
    model = model_of(arguments)
    _refuse_without_effect(arguments, model)
    _require_one_output(arguments)
    return _run_one(arguments, model) if arguments.devices is None else _run_search(arguments, model)


def _run_one(arguments: argparse.Namespace, model: Model) -> int:
    names = SEARCH if arguments.breakdown else (*SEARCH, "svg")
    if given := [*map(flag, values_of(arguments, names))]:
        raise UsageError(f"{', '.join(given)} {'is' if len(given) == 1 else 'are'} for a search: give --devices too")
    if arguments.breakdown and arguments.device is None and arguments.cluster is None:
        raise UsageError("--breakdown tells where seconds go: say on which device, with --device or --cluster")
    setup, cluster = setup_of(arguments, LAYOUT), cluster_of(arguments)
    with doing("planning"):
        cut = _cuts(arguments, model, setup, cluster)
        schedule = _schedule(arguments, model, setup, cut, cluster)
        parts = cut(schedule.placement)
        if arguments.cut == "cost" and cluster is not None:
            parts = cut_for(model, schedule, setup, cluster, parts)
        found = plan(model, schedule, setup, flops=arguments.flops, cluster=cluster, cut=parts)
    told = {"says_layout": arguments.layout is not None, "has_parts": arguments.breakdown}
    lines, used = [*reports.plan_lines(arguments.model, found, **told)], found
    if found.fits is False and setup.head_slices == 1:
        slicing = replace(setup, head_slices=reports.SLICES)
        sliced = plan(model, schedule, slicing, flops=arguments.flops, cluster=cluster, cut=parts)
        lines += reports.sliced_lines(found, sliced)
        used = sliced if sliced.fits and arguments.library is None else found
    planned = [Planned(used, _options(arguments, found.schedule))]
    return _tell(arguments, planned, lambda: reports.plan_svg(found), lambda: reports.plan_json(found), iter(lines))


def _options(arguments: argparse.Namespace, schedule: Schedule) -> dict[str, Any]:
    """The options with which a schedule with a name was made; none of another one."""
    if schedule.name not in SCHEDULES:
        return {}
    own = {*options_of(schedule.name)} & {*family_options()}
    chunks = {"chunks": stages_per_rank(schedule)} if "chunks" in own else {}
    return chunks | values_of(arguments, sorted(own))


def _run_search(arguments: argparse.Namespace, model: Model) -> int:
    top = 5 if arguments.top is None else arguments.top
    if top < 1:
        raise UsageError(f"--top must be at least 1, got {top}")
    wanted = _wanted(arguments, model)
    with doing("searching for layouts") as progress:
        found = find_layouts(wanted, top=top, progress=progress)
    with doing("searching on fewer devices"):
        fewer = faster_on_fewer(found)
    used, has_parts = layout_reports.to_use(found), arguments.breakdown
    told = {"says_layout": arguments.layout is not None, "has_parts": has_parts}
    lines = layout_reports.search_lines(arguments.model, found, fewer, **told)
    drawn = partial(layout_reports.search_svg, found, has_parts=has_parts)
    return _tell(arguments, used, drawn, lambda: layout_reports.search_json(found, fewer), lines)


def _run_replan(arguments: argparse.Namespace) -> int:
    measured = read_as(arguments.measured, Timeline.from_json)
    with doing("planning"):
        found = replan(measured)
    if arguments.csv is not None:
        write({arguments.csv: found.best.schedule.to_csv()})
    return _tell(arguments, [], str, lambda: reports.replan_json(found), reports.replan_lines(found))


def _tell(
    arguments: argparse.Namespace,
    plans: Sequence[Planned],
    drawn: Callable[[], str],
    values: Callable[[], Mapping[str, Any]],
    lines: reports.Lines,
) -> int:
    """Writes the picture, and prints the options of a library, JSON, or the lines, as it is asked for."""
    if arguments.svg is not None:
        write({arguments.svg: drawn()})
    if arguments.library is not None:
        print_options(arguments.library, plans)
    elif arguments.json:
        print(json.dumps(values()))
    elif arguments.svg != STANDARD_OUTPUT:
        used = ["", *use_lines(plans, arguments.words)] if plans else []
        show(*lines, *used)
    return 0


def _refuse_without_effect(arguments: argparse.Namespace, model: Model) -> None:
    """Raises UsageError for options about what the plan has not. A search chooses what is not given, so it reads
    them.
    """
    searches = arguments.devices is not None
    if not (arguments.zero == 3 or (searches and arguments.zero is None)):
        refuse(arguments, ("prefetch",), "without --zero 3")
    if not ((arguments.context or 1) > 1 or (searches and arguments.context is None)):
        refuse(arguments, ("context_kind",), "without --context")
    recomputes = arguments.checkpoint not in (None, "none") or arguments.recompute_modules
    if not (recomputes or (searches and arguments.checkpoint is None)):
        refuse(arguments, ("early_stop",), "without --checkpoint")
    if model.experts < 2:
        refuse(arguments, EXPERTS, f"by {arguments.model}, which has no experts")


def _require_one_output(arguments: argparse.Namespace) -> None:
    """Raises UsageError for more than one of --for, --json and a plot for standard output."""
    given = {"--for": arguments.library, "--json": arguments.json, "--svg": arguments.svg == STANDARD_OUTPUT}
    names = [name for name, value in given.items() if value]
    if len(names) > 1:
        raise UsageError(f"standard output can take one output, not {' and '.join(names)}")
    if arguments.library is not None and arguments.svg is None:
        refuse(arguments, ("breakdown",), "with --for")


def model_of(arguments: argparse.Namespace) -> Model:
    """The model with the sizes that were given. Raises UsageError for sizes that it does not have."""
    is_config = arguments.model.endswith(".json")
    model: Model = read_as(arguments.model, model_in) if is_config else model_named(arguments.model)
    given = values_of(arguments, SIZES)
    if arguments.layout and arguments.layout.mtp:
        given = {"mtp": arguments.layout.mtp, **given}
    own = [each.name for each in fields(model)]
    if strange := [flag(name) for name in given if name not in own]:
        raise UsageError(f"{arguments.model} takes no {', '.join(strange)}; its sizes are {', '.join(map(flag, own))}")
    return replace(model, **given)


def setup_of(arguments: argparse.Namespace, names: Sequence[str]) -> Setup:
    """The setup with those of its fields that are among `names`."""
    given = values_of(arguments, names) | {"engine": arguments.engine or arguments.library}
    if "precision" in given:
        given["precision"] = PRECISIONS[given["precision"]]
    return Setup(**given)


def _schedule(
    arguments: argparse.Namespace, model: Model, setup: Setup, cut: Callable[[Placement], Cut], cluster: Cluster | None
) -> Schedule:
    options, layout = values_of(arguments, family_options()), arguments.layout
    name, ranks = arguments.schedule, 4 if arguments.pipeline is None else arguments.pipeline
    if name is not None and is_file(name):
        if arguments.pipeline is not None:
            raise UsageError(f"--pipeline is for named schedules; {name} has its own ranks")
        file = changed(arguments, ranks=None, placement=None, forward_only=False, **dict.fromkeys(STAGE_OPTIONS))
        return sound_schedule(request_of(name, file, GivenCosts()))
    if layout and ranks > 0:  # without a name, 1F1B, which is interleaved for several stages per rank
        chunks = layout.chunks(ranks)
        name = name or ("1f1b" if chunks == 1 else "interleaved-1f1b")
        if name in SCHEDULES and "chunks" in options_of(name):
            options = {"chunks": chunks, **options}
    prices = ModelPrices(model, setup, cluster, cut)
    sizes = {"ranks": ranks, **values_of(arguments, ("microbatches",))}
    request = ScheduleRequest(name or "1f1b", prices, **sizes, options=tuple(options.items()))
    require_size(request)
    layers = model.layers + model.further_layers
    if not layout and ranks > layers + MOST_LAYERLESS:  # before a schedule is made for them
        raise UsageError(f"{layers:,} layers cannot fill {ranks:,} pipeline ranks: use at most {layers:,}")
    return request.schedule()


def _cuts(
    arguments: argparse.Namespace, model: Model, setup: Setup, cluster: Cluster | None
) -> Callable[[Placement], Cut]:
    """The function that gives the cut for the stages of a placement. Raises UsageError for two options that divide the
    layers.
    """
    layout, ends = arguments.layout, (arguments.first_stage_layers, arguments.last_stage_layers)
    if layout and arguments.cut is not None:
        raise UsageError("--layout and --cut both divide the layers: give one of them")
    if ends != (None, None):
        for name in ("cut", "layout"):
            if getattr(arguments, name):
                raise UsageError(f"--first-stage-layers and --last-stage-layers exclude --{name}: give one of them")
        if min(size for size in ends if size is not None) < 0:
            raise UsageError("--first-stage-layers and --last-stage-layers must be at least 0")
        return lambda placement: cut_with_ends(model.layers, placement, *ends)
    if layout:
        return partial(layout.placed, model.layers, model.further_layers)
    return lambda placement: cut_of(arguments.cut, model, placement, setup, cluster)


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


def _wanted(arguments: argparse.Namespace, model: Model) -> Wanted:
    if arguments.batch is None:
        raise UsageError("--devices searches for layouts: say how many sequences a step has, with --batch")
    if arguments.devices > MOST_DEVICES:
        raise UsageError(
            f"--devices {arguments.devices:,} is too large for a search, which takes at most {MOST_DEVICES:,}: search "
            "for a half or a tenth of the devices and of the batch, then plan that layout with more replicas (--data)"
        )
    most = MOST_SEQUENCES * arguments.devices
    if 0 < most < arguments.batch:
        room = f"{MOST_SEQUENCES:,} for each, {most:,} in all"
        large = f"--batch {arguments.batch:,} is too large for a search on {arguments.devices:,} devices"
        raise UsageError(f"{large}: at most {room}")
    for name, why in REFUSED.items():
        if getattr(arguments, name) not in (None, ""):  # --layout without a value asks for the string
            raise UsageError(f"{flag(name)} is for one layout, not for a search with --devices: {why}")
    taken = "kinds", "slices"
    if given := [flag(name) for name in family_options() if name not in taken and getattr(arguments, name)]:
        raise UsageError(f"{', '.join(given)}: a search with --devices chooses the options of schedules itself")
    cluster = cluster_of(arguments)
    if cluster is None:
        raise UsageError("--devices searches for the fastest layouts: say which device, with --device or --cluster")
    library, fixed = LIBRARIES.get(arguments.library or ""), {name: getattr(arguments, name) for name in FIXED}
    searched = tuple(name for name in SEARCHED if library is None or name in library.schedules)
    if library is not None:
        fixed |= {name: fixed[name] or 1 for name in library.single}
    setup = setup_of(arguments, [name for name in LAYOUT if name not in {*FIXED, *REFUSED}])
    return Wanted(
        model,
        cluster,
        arguments.devices,
        arguments.batch,
        memory=arguments.memory,
        setup=setup,
        schedules=searched if arguments.schedule is None else (arguments.schedule,),
        kinds=arguments.kinds or "none",
        slices=arguments.slices or (None if library is None and setup.engine is None else 1),
        **fixed,
    )
