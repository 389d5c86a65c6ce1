"""`pipeflow plan --devices`: the best layouts of a model on a cluster, ranked."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator
from dataclasses import asdict, fields
from typing import Any

from pipeflow.core.errors import UsageError
from pipeflow.core.text import bytes_text, number, seconds_text
from pipeflow.draw import Table
from pipeflow.planning.catalog import Model
from pipeflow.planning.cuts import even_cut
from pipeflow.planning.layout import GIVEN, SEARCHED, Wanted
from pipeflow.planning.layouts import TIE, Layouts, Ranked, faster_on_fewer, find_layouts, plainest
from pipeflow.planning.omissions import uncounted, unpriced
from pipeflow.planning.setup import PRECISIONS, Setup
from pipeflow.planning.similar import said
from pipeflow.schedules.registry import family_options
from pipeflow.tools.cli.options import Parser, flag
from pipeflow.tools.cli.outputs import STANDARD_OUTPUT, doing, show, wrapped, write
from pipeflow.tools.cli.plan_options import cluster_of, print_options, require_one_output, said_layout, schedules_of
from pipeflow.tools.cli.plan_results import (
    MADE_FOR,
    bars_of,
    beside_each_other,
    for_programs,
    plotted,
    schedule_text,
    sizes_text,
)
from pipeflow.tools.cli.requests import require_search_size

UNITS = {"": 1, "b": 1} | {
    prefix + unit: base**power
    for power, prefix in enumerate("kmgt", start=1)
    for unit, base in (("b", 1000), ("ib", 1024))
}
LEAST = 1e6  # bytes of memory: less must be a number of GB without its unit
FIXED = (*GIVEN, "checkpoint", "zero", "sequence_parallel", "overlap", "shard_ranks")
SIZES = ("tensor", "pipeline", "data", "context", "expert", "microbatch_size", "microbatches")
CHOSEN = (*SIZES, "schedule", "checkpoint", "zero", "sequence_parallel", "overlap", "cut")
FURTHER = ("context", "expert")  # sizes that are shown where they are more than 1
REFUSED = {
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


def add_search(command: Parser) -> None:
    """Adds the options of the search."""
    group = command.add_argument_group("search", "the best layouts, ranked; layout options that are given stay fixed")
    add = group.add_argument
    add("--devices", type=int, metavar="N", help="number of devices: search for their best layouts")
    add("--batch", type=int, metavar="B", help="sequences per step, on all devices together")
    limit = "memory of a device that may be used, such as 80GiB or 80e9 (default: what the device has for tensors)"
    add("--memory", type=memory_size, metavar="BYTES", help=limit)
    add("--top", type=int, metavar="K", help="number of layouts to list (default: 5)")
    add("--svg", metavar="FILE", help="write a plot of step time against memory as SVG, or with --breakdown bars")


def memory_size(text: str) -> float:
    """A number of bytes with or without a unit: 80GiB, 80GB, 80e9."""
    match = re.fullmatch(r"([0-9.]+(?:e[+-]?[0-9]+)?)\s*([a-z]*)", text.strip().lower())
    try:
        size = float(match[1]) * UNITS[match[2]] if match else float("nan")
    except (ValueError, KeyError):
        size = float("nan")
    if not LEAST <= size < float("inf"):
        raise argparse.ArgumentTypeError(f"it must be a size such as 80GiB, 80GB or 80e9, got {text!r}")
    return size


def require_search(arguments: argparse.Namespace) -> None:
    """Raises UsageError for options of the search without --devices."""
    alone = ("svg",) if not arguments.breakdown else ()
    given = [flag(name) for name in ("batch", "memory", "top", *alone) if getattr(arguments, name) is not None]
    if given:
        raise UsageError(f"{', '.join(given)} {'is' if len(given) == 1 else 'are'} for a search: give --devices too")


def run(arguments: argparse.Namespace, model: Model) -> int:
    """Searches, and prints what was found."""
    top = 5 if arguments.top is None else arguments.top
    if top < 1:
        raise UsageError(f"--top must be at least 1, got {top}")
    require_one_output(arguments)
    wanted = _wanted(arguments, model)
    with doing("searching for layouts") as progress:
        found = find_layouts(wanted, top=top, progress=progress)
    with doing("searching on fewer devices"):
        fewer = faster_on_fewer(found)
    if arguments.svg is not None:
        write({arguments.svg: bars_of(found) if arguments.breakdown else plotted(found)})
    if arguments.library is not None:
        print_options(arguments, *(each.plan for each in found.ranked))
    elif arguments.json:
        print(json.dumps(_search_for_programs(found, fewer)))
    elif arguments.svg != STANDARD_OUTPUT:
        layout = said_layout(arguments, found.ranked[0].plan)
        plans = [each.plan for each in found.ranked]
        said = [*_fewer(found, fewer), *_notes(found)]
        parts = beside_each_other(plans) if arguments.breakdown else _parts(found)
        show(*_heading(arguments.model, found), "", _table(found), "", parts, "", *said, *layout)
    return 0


def _wanted(arguments: argparse.Namespace, model: Model) -> Wanted:
    if arguments.batch is None:
        raise UsageError("--devices searches for layouts: say how many sequences a step has, with --batch")
    require_search_size(arguments.devices, arguments.batch)
    for name, why in REFUSED.items():
        if getattr(arguments, name) not in (None, ""):  # --layout without a value asks for the string
            raise UsageError(f"{flag(name)} is for one layout, not for a search with --devices: {why}")
    if given := [flag(name) for name in family_options() if name != "kinds" and getattr(arguments, name)]:
        raise UsageError(f"{', '.join(given)}: a search with --devices chooses the options of schedules itself")
    cluster = cluster_of(arguments)
    if cluster is None:
        raise UsageError("--devices searches for the fastest layouts: say which device, with --device or --cluster")
    return Wanted(
        model,
        cluster,
        arguments.devices,
        arguments.batch,
        memory=arguments.memory,
        setup=_kept(arguments),
        schedules=schedules_of(arguments, SEARCHED) if arguments.schedule is None else (arguments.schedule,),
        kinds=arguments.kinds or "none",
        **{name: getattr(arguments, name) for name in FIXED},
    )


def _kept(arguments: argparse.Namespace) -> Setup:
    """The settings that all layouts share."""
    names = [each.name for each in fields(Setup) if each.name not in {*FIXED, *REFUSED, "precision"}]
    given = {name: value for name in names if (value := getattr(arguments, name)) is not None}
    engine = arguments.engine or arguments.library
    return Setup(**given | {"precision": PRECISIONS[arguments.precision], "engine": engine})


def _search_for_programs(found: Layouts, fewer: Layouts | None) -> dict[str, Any]:
    wanted, best = found.wanted, found.ranked[0]
    return {
        "model": asdict(wanted.model),
        "cluster": asdict(wanted.cluster),
        "not_counted": uncounted(wanted.model, wanted.cluster),
        "not_priced": unpriced(wanted.model, found.ranked[0].layout.setup),
        "devices": wanted.devices,
        "batch": wanted.batch,
        "memory_bytes": wanted.limit,
        "tie": TIE,
        "simulated": found.simulated,
        "fewer_devices": None if fewer is None else _fewer_for_programs(fewer),
        "layouts": [
            _sizes(each)
            | {
                "layout_string": each.plan.layout_string,
                "step_seconds": each.step_seconds,
                "tokens_per_second": each.plan.tokens_per_second,
                "peak_bytes": each.plan.peak_bytes,
                "peak_parts": each.plan.peak_parts,
                "rank_bytes": [rank.peak_bytes for rank in each.plan.ranks],
                "step_parts": each.parts._asdict(),
                "breakdown": for_programs(each.plan),
                "more_than_first": each.grown(best),
            }
            for each in found.ranked
        ],
    }


def _fewer_for_programs(fewer: Layouts) -> dict[str, Any]:
    first = fewer.ranked[0]
    return {"devices": fewer.wanted.devices, "step_seconds": first.step_seconds, **_sizes(first)}


def _sizes(found: Ranked) -> dict[str, Any]:
    """The layout for programs; costs that a schedule was made for are left out."""
    layout = found.layout
    named = {name: getattr(layout, name) for name in CHOSEN} | {"attention": found.plan.attention}
    return named | {"options": {name: value for name, value in layout.options.items() if name not in MADE_FOR}}


def _heading(name: str, found: Layouts) -> Iterator[str]:
    wanted, first = found.wanted, found.ranked[0].plan
    tokens = f"{wanted.batch:,} sequences of {first.sequence:,} tokens"
    yield f"{name}: {wanted.model.parameters:,} parameters, {tokens} a step"
    yield f"{wanted.devices:,} devices {wanted.cluster.device.name}, at most {bytes_text(wanted.limit)} on each"


def _table(found: Layouts) -> Table:
    has_contexts, has_experts = (any(getattr(each.layout, name) > 1 for each in found.ranked) for name in FURTHER)
    has_zeros = any(each.layout.zero > 1 for each in found.ranked)
    titles = [
        "",
        "schedule",
        "tensor x\npipeline x\ndata" + " x\ncontext" * has_contexts,
        *["expert\nranks"] * has_experts,
        "micro-\nbatches",
        "re-\ncompute",
        *["ZeRO"] * has_zeros,
        "step",
        "tokens/s",
        "peak",
    ]
    rows = [
        [
            str(place),
            schedule_text(each.layout),
            sizes_text(each.layout) + f"x{each.layout.context}" * has_contexts,
            *[str(each.layout.expert)] * has_experts,
            f"{each.layout.microbatches}x{each.layout.microbatch_size}",
            "scores" if each.layout.checkpoint == "selective" else each.layout.checkpoint,
            *[f"{each.layout.zero}"] * has_zeros,
            seconds_text(each.step_seconds),
            number(each.plan.tokens_per_second or 0.0),
            bytes_text(each.plan.peak_bytes),
        ]
        for place, each in enumerate(found.ranked, start=1)
    ]
    return Table(titles, rows)


def _parts(found: Layouts) -> Table:
    names = found.ranked[0].parts._fields
    rows = [[str(place), *map(seconds_text, each.parts)] for place, each in enumerate(found.ranked, start=1)]
    return Table(["", *names], rows)


def _ties(found: Layouts) -> Iterator[str]:
    """Which layouts are about as fast as the first one, and the plainest of them."""
    timed = [(each.step_seconds, each.layout) for each in found.ranked]
    tied = sum(seconds <= timed[0][0] * (1 + TIE) for seconds, _ in timed)
    if tied > 1:
        place = timed.index(plainest(timed)) + 1
        rule = "fewest tensor ranks, then fewest pipeline, context and expert ranks, then least recomputation"
        yield from wrapped(f"Times of 1-{tied} are within {TIE:.0%}, which is a tie. The plainest is {place}: {rule}.")


def _notes(found: Layouts) -> Iterator[str]:
    first, wanted = found.ranked[0], found.wanted
    for place, each in enumerate(found.ranked[1:], start=2):
        yield from wrapped(_why(place, each, first))
    yield from _ties(found)
    if wanted.tensor is None or wanted.pipeline is None:
        yield "Each row has other sizes; --tensor and --pipeline together compare schedules."
    if any("chunks" in each.layout.options for each in found.ranked):
        yield "x2: two stages per rank, and so on."
    if any(each.layout.zero == 1 for each in found.ranked) and wanted.zero is None:
        yield "ZeRO-1 splits the optimizer state wherever there are replicas."
    yield from wrapped(" ".join(_split(found)))
    if not first.layout.setup.stores_scores:
        yield f"All with --attention {first.plan.attention}."
    cut = first.layout.cut
    if cut != even_cut(wanted.model.layers, len(cut)):
        yield from wrapped(f"Layers per stage of 1: {' '.join(str(end - start) for start, end in cut)}")
        if first.plan.has_uneven_layout:
            yield f"layout: {first.plan.layout_string}"
    yield from wrapped(f"not counted: {'; '.join(uncounted(wanted.model, wanted.cluster))}")
    if missing := unpriced(wanted.model, first.layout.setup):
        yield from wrapped(f"not priced: {'; '.join(missing)}")
    yield from wrapped(said(wanted.model, first.layout.setup, wanted.cluster))


def _split(found: Layouts) -> Iterator[str]:
    """What all layouts do unless the command says otherwise."""
    setups = [each.layout.setup for each in found.ranked]
    if found.wanted.sequence_parallel is None and any(each.sequence_parallel for each in setups):
        yield "Tensor ranks split the sequence, too (--sequence-parallel)."
    if found.wanted.overlap is None and all(each.overlaps and each.tensor * each.replicas > 1 for each in setups):
        yield "Communication runs beside computations (--overlap)."


def _fewer(found: Layouts, fewer: Layouts | None) -> Iterator[str]:
    """That fewer devices are faster, if they are."""
    if fewer is None:
        return
    first, devices = fewer.ranked[0], fewer.wanted.devices
    sizes = f"{sizes_text(first.layout)} with {schedule_text(first.layout)}"
    saved = 1 - first.step_seconds / found.ranked[0].step_seconds
    yield from wrapped(
        f"Fewer devices are faster here: {devices} take {seconds_text(first.step_seconds)} for a step ({sizes}), "
        f"{saved:.0%} less than {found.wanted.devices}."
    )


def _why(place: int, each: Ranked, first: Ranked) -> str:
    """The parts of its time in which a layout differs from the first one by more than a thousandth."""
    more, least = each.step_seconds - first.step_seconds, 0.001 * first.step_seconds
    grown = each.grown(first).items()
    changes = ", ".join(f"{name} {_signed(seconds)}" for name, seconds in grown if abs(seconds) > least)
    is_tie = abs(more) <= TIE * min(each.step_seconds, first.step_seconds)
    return f"{place} {'ties with 1: ' if is_tie else ''}{_signed(more)}{f' ({changes})' if changes else ''}"


def _signed(seconds: float) -> str:
    return f"{'+' * (seconds >= 0)}{seconds_text(seconds)}"
