"""`pipeflow plan`: the memory of each rank and the time of a step for a model under a layout."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, fields
from functools import partial
from typing import Any

from pipeflow.core.cost import CostModel
from pipeflow.core.errors import UsageError
from pipeflow.core.partition import Cut
from pipeflow.core.placement import Placement
from pipeflow.core.schedule import Schedule
from pipeflow.draw import Table
from pipeflow.planning.attention import KERNELS
from pipeflow.planning.catalog import MODELS, Model, model_named
from pipeflow.planning.cluster import Cluster
from pipeflow.planning.cuts import cut_with_ends
from pipeflow.planning.estimate import plan
from pipeflow.planning.mesh import Mesh
from pipeflow.planning.omissions import uncounted, unpriced
from pipeflow.planning.physical import physical_costs
from pipeflow.planning.setup import (
    CHECKPOINTS,
    CONTEXT_KINDS,
    DISPATCHERS,
    GRAPHS,
    LORA_TARGETS,
    MODULES,
    PRECISIONS,
    Setup,
)
from pipeflow.planning.similar import said, similar_values
from pipeflow.planning.step_plan import TITLES, Plan
from pipeflow.planning.time_shares import breakdown
from pipeflow.planning.transformer_costs import stage_costs
from pipeflow.schedules import SCHEDULES, make_schedule, options_of
from pipeflow.schedules.registry import family_options
from pipeflow.tools.cli.layouts import add_search, require_search
from pipeflow.tools.cli.layouts import run as run_search
from pipeflow.tools.cli.options import Commands, Parser, add_family_options, schedule_name
from pipeflow.tools.cli.outputs import STANDARD_OUTPUT, doing, show, wrapped, write
from pipeflow.tools.cli.plan_options import (
    add_cluster,
    add_cut,
    add_layout_string,
    add_library,
    add_sharding,
    add_sizes,
    cluster_of,
    cut_for,
    cut_of,
    ends_of,
    layout_of,
    model_of,
    placed,
    print_options,
    require_one_output,
    said_layout,
    with_chunks,
)
from pipeflow.tools.cli.plan_results import (
    add_breakdown,
    breakdown_svg,
    breakdown_table,
    for_programs,
    require_seconds,
    run_replan,
)
from pipeflow.tools.cli.requests import (
    ScheduleOptions,
    is_file,
    refuse,
    refuse_all_but,
    refuse_without_effect,
    require_filled,
    require_size,
    sound_schedule,
)

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
REPLAN = ("measured", "csv", "json")  # what a replan reads
LAYOUT = tuple(field.name for field in fields(Setup))


def add_plan(commands: Commands) -> None:
    """Adds the command and its options."""
    command = commands.add_parser(
        "plan",
        help="estimate memory per rank, step time and bubble of a model",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("model", metavar="MODEL", nargs="?", help=f"one of {', '.join(MODELS)}")
    add_sizes(command)
    _add_schedule(command)
    _add_layout(command)
    add_search(command)
    add_cluster(command)
    help_ = "FLOP/s of one device; gives times in seconds without communication"
    command.add_argument("--flops", type=float, metavar="X", help=help_)
    command.add_argument("--json", action="store_true", help="print JSON")
    add_breakdown(command)
    add_library(command)
    again = command.add_argument_group("replanning", "instead of MODEL, after a step was measured")
    help_ = "timeline of a traced step (JSON): compare schedules under its costs"
    again.add_argument("--measured", metavar="FILE", help=help_)
    again.add_argument("--csv", metavar="FILE", help="write the fastest schedule within the same memory as CSV")
    command.set_defaults(run=run)


def _add_schedule(command: Parser) -> None:
    group = command.add_argument_group("schedule")
    help_ = "a name from `pipeflow list`, or a file"
    group.add_argument("--schedule", type=schedule_name, metavar="SCHEDULE", help=f"{help_} (default: 1f1b)")
    group.add_argument("--pipeline", type=int, metavar="P", help="number of pipeline ranks (default: 4)")
    group.add_argument("--microbatches", type=int, metavar="M", help="number of microbatches per replica (default: 8)")
    add_family_options(group)


def _add_layout(command: Parser) -> None:
    group = command.add_argument_group("layout")
    add = group.add_argument
    add("--tensor", type=int, metavar="T", help="number of tensor ranks (default: 1)")
    add("--data", type=int, metavar="D", help="number of replicas (default: 1)")
    add("--microbatch-size", type=int, metavar="B", help="sequences per microbatch (default: 1)")
    add("--sequence", type=int, metavar="S", help="tokens per sequence (default: the model's positions)")
    add("--precision", choices=PRECISIONS, default="bf16", help="types of weights and states (default: %(default)s)")
    add_sharding(group)
    checkpoint = "full (or no value): keep only each layer's input and recompute the layer; selective: recompute "
    checkpoint += "scores; op: recompute all but attention and every other product"
    add("--checkpoint", choices=CHECKPOINTS, nargs="?", const="full", help=checkpoint)
    stop = "recompute a layer up to its last product, as torch does since 2.1 (default: as --engine does)"
    add("--early-stop", action=argparse.BooleanOptionalAction, help=stop)
    split = "also split the activations of norms over the tensor ranks (a search tries it)"
    add("--sequence-parallel", action=argparse.BooleanOptionalAction, help=split)
    add("--keep-scores", action="store_true", help="keep attention scores, as without scaled_dot_product_attention")
    add("--attention", choices=KERNELS, help="its kernel: unfused stores scores; FlashAttention 1 to 3, or cuDNN as 3")
    add("--context", type=int, metavar="C", help="number of context ranks, which share each sequence (default: 1)")
    kinds = "how attention sees tokens of other context ranks (default: ring)"
    add("--context-kind", choices=CONTEXT_KINDS, help=kinds)
    ranks = "number of expert ranks, among the devices of a stage (default: 1)"
    add("--expert", type=int, metavar="E", help=ranks)
    add("--expert-tensor", type=int, metavar="T", help="devices that share each expert (default: as --tensor)")
    fullest = "tokens of the fullest expert rank, as a multiple of the mean (default: 1)"
    add("--imbalance", type=float, metavar="X", help=fullest)
    add("--dispatcher", choices=DISPATCHERS, help="how tokens go to experts (default: all-to-all)")
    add("--overlap-experts", action="store_true", help="hide the exchange between experts behind another microbatch")
    modules = f"modules that backwards compute again, of {', '.join(MODULES)}"
    add("--recompute-modules", type=words, metavar="M,...", help=modules)
    add("--frozen", action="store_true", help="weights do not learn: no gradients, no optimizer, no inputs of linears")
    add("--lora-rank", type=int, metavar="R", help="frozen weights with adapters of this rank (LoRA)")
    targets = f"linears with an adapter, of {', '.join(LORA_TARGETS)} (default: all)"
    add("--lora-targets", type=words, metavar="L,...", help=targets)
    add("--checkpoint-layers", type=int, metavar="N", help="layers of each stage that --checkpoint is for")
    add("--offload-layers", type=int, metavar="N", help="layers of each stage whose activations go to the host")
    add("--cuda-graphs", type=words, metavar="S,...", help=f"scopes of CUDA graphs, of {', '.join(GRAPHS)}")
    add_cut(group)
    add_layout_string(group)


def words(text: str) -> tuple[str, ...]:
    """The words of a list with commas."""
    return tuple(word.strip() for word in text.split(",") if word.strip())


def run(arguments: argparse.Namespace) -> int:
    """Prints the plan of one layout, the best layouts, or what other schedules would gain."""
    if arguments.measured is not None:
        refuse_all_but(arguments, REPLAN, "with --measured, which has no model and reads --csv and --json alone")
        return run_replan(arguments)
    refuse(arguments, ("csv",), "without --measured")
    if arguments.model is None:
        raise UsageError(f"say which model: pipeflow plan MODEL, with one of {', '.join(MODELS)}")
    model = model_of(arguments)
    refuse_without_effect(arguments, model)
    if arguments.devices is not None:
        return run_search(arguments, model)
    require_search(arguments)
    require_seconds(arguments)
    require_one_output(arguments)
    options = {name: value for name in LAYOUT if (value := getattr(arguments, name)) is not None}
    engine = arguments.engine or arguments.library
    setup = Setup(**options | {"precision": PRECISIONS[arguments.precision], "engine": engine})
    cluster = cluster_of(arguments)
    with doing("planning"):
        cut = _cuts(arguments, model, setup, cluster)
        schedule = _schedule(arguments, model, setup, cut, cluster)
        parts = cut(schedule.placement)
        if arguments.cut == "cost" and cluster is not None:
            parts = cut_for(model, schedule, setup, cluster, parts)
        found = plan(model, schedule, setup, flops=arguments.flops, cluster=cluster, cut=parts)
    if arguments.svg is not None:
        write({arguments.svg: breakdown_svg([(found.schedule.name, breakdown(found))])})
    if arguments.library is not None:
        print_options(arguments, found)
    elif arguments.json:
        print(json.dumps(_for_programs(found)))
    elif arguments.svg != STANDARD_OUTPUT:
        heading = [*_heading(arguments.model, found), *said_layout(arguments, found)]
        told = ["", *breakdown_table(found)] if arguments.breakdown else []
        show(*heading, "", _table(found), "", *found.totals(), *told, *_notes(found))
    return 0


def _cuts(
    arguments: argparse.Namespace, model: Model, setup: Setup, cluster: Cluster | None
) -> Callable[[Placement], Cut]:
    """The function that gives the cut for the stages of a placement."""
    layout, ends = layout_of(arguments), ends_of(arguments)
    if layout is not None:
        return partial(placed, layout, model)
    if ends is not None:
        return lambda placement: cut_with_ends(model.layers, placement, *ends)
    return lambda placement: cut_of(arguments.cut, model, placement, setup, cluster)


def _schedule(
    arguments: argparse.Namespace, model: Model, setup: Setup, cut: Callable[[Placement], Cut], cluster: Cluster | None
) -> Schedule:
    options: dict[str, Any] = {
        option: value for option in family_options() if (value := getattr(arguments, option)) is not None
    }
    name, ranks = arguments.schedule, 4 if arguments.pipeline is None else arguments.pipeline
    if name is not None and is_file(name):
        if arguments.pipeline is not None:
            raise UsageError(f"--pipeline is for named schedules; {name} has its own ranks")
        given = ScheduleOptions(microbatches=arguments.microbatches, options=tuple(options.items()))
        return sound_schedule(given.request(name))
    layout = layout_of(arguments)
    name, options = with_chunks(layout, name, ranks, options)
    microbatches = 8 if arguments.microbatches is None else arguments.microbatches
    require_size(ranks, microbatches, options)
    if layout is None:
        require_filled(ranks, model.layers + model.further_layers)
    if name in SCHEDULES and "cost" in options_of(name):  # the schedule is made for given costs, which are per stage
        placement = make_schedule(name, ranks=ranks, microbatches=1).placement
        options["cost"] = _costs(model, placement, setup, cluster, cut(placement))
    return make_schedule(name, ranks=ranks, microbatches=microbatches, **options)


def _costs(model: Model, placement: Placement, setup: Setup, cluster: Cluster | None, cut: Cut) -> CostModel:
    """The costs that an order is made for: in seconds, with copies to the host, if the cluster is known."""
    if cluster is None:
        return stage_costs(model, placement, setup, cut=cut)
    mesh = Mesh.of(setup, placement.num_ranks, cluster.devices_per_node)
    return physical_costs(model, placement, setup, mesh, cluster, cut=cut).cost


def _for_programs(found: Plan) -> dict[str, Any]:
    derived = ("layers", "optimizer_bytes", "allocator_bytes", "peak_bytes")
    return {
        "model": asdict(found.model),
        "parameters_total": found.parameters_total,
        "schedule": found.schedule.name,
        "microbatches": found.schedule.num_microbatches,
        "layout": asdict(found.setup)
        | {"pipeline": len(found.ranks), "sequence": found.sequence, "attention": found.attention},
        "layout_string": found.layout_string,
        "devices": found.devices,
        "ranks": [asdict(rank) | {name: getattr(rank, name) for name in derived} for rank in found.ranks],
        "makespan_bubble_ratio": found.makespan_bubble_ratio,
        "even_makespan_bubble_ratio": found.even_makespan_bubble_ratio,
        "bubble_ratio": found.bubble_ratio,
        "makespan": found.timeline.makespan,
        "unit": "s" if found.has_seconds else "layer forwards",
        "step_seconds": found.step_seconds,
        "step_parts": None if found.step_parts is None else found.step_parts._asdict(),
        "breakdown": for_programs(found),
        "peak_bytes": found.peak_bytes,
        "outside_bytes": found.outside_bytes,
        "peak_parts": found.peak_parts,
        "fits": found.fits,
        "not_counted": uncounted(found.model, found.cluster),
        "not_priced": unpriced(found.model, found.setup),
        "similar_error": similar_values(found.model, found.setup, found.cluster),
        "cluster": None if found.cluster is None else asdict(found.cluster),
        "tokens": found.tokens,
        "tokens_per_second": found.tokens_per_second,
    }


def _heading(name: str, found: Plan) -> Iterator[str]:
    resized = "" if found.model == model_named(name) else ", resized"
    sizes, *others = found.heading()
    yield f"{name}{resized}: {sizes}"
    yield from others


def _table(found: Plan) -> Table:
    return Table(TITLES, found.rows())


def _notes(found: Plan) -> Iterator[str]:
    """Notes on what the numbers include and leave out."""
    if not found.setup.stores_scores:
        yield "activations: without attention scores (--keep-scores adds them)"
    yield from wrapped(f"not counted: {'; '.join(uncounted(found.model, found.cluster))}")
    if missing := unpriced(found.model, found.setup):
        yield from wrapped(f"not priced: {'; '.join(missing)}")
    yield from wrapped(said(found.model, found.setup, found.cluster))
