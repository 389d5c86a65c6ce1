"""What is printed of plans: one layout, the layouts that a search found, what other schedules would gain, and two plans
that were printed as JSON compared; each as lines with tables, as JSON values, and as pictures.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any, get_args

from pipeflow.core.text import bytes_text, listed, number, percent, seconds_text
from pipeflow.draw import Axis, Bar, Point, Table, bars_svg, scatter_svg
from pipeflow.draw.captions import Unit
from pipeflow.planning.catalog import model_named
from pipeflow.planning.cuts import even_cut
from pipeflow.planning.device_map import crossing
from pipeflow.planning.estimate import MEANINGS, Breakdown, breakdown
from pipeflow.planning.layout import Layout
from pipeflow.planning.layout_ties import TIE, plainer
from pipeflow.planning.layouts import Layouts, Ranked, described
from pipeflow.planning.replanning import Candidate, Replan
from pipeflow.planning.setup import ContextKind
from pipeflow.planning.similar import said, similar_error, uncounted, unpriced
from pipeflow.planning.step_plan import TITLES, Plan
from pipeflow.tools.cli.outputs import wrapped

Lines = Iterator[Table | str]
LONGEST = 24  # letters of a bar in a terminal
SLICES = 8  # of tokens in which logits are computed, where they are proposed


def plan_lines(name: str, found: Plan, *, says_layout: bool, has_parts: bool) -> Lines:
    """The plan of the model `name`, with its layout string and the parts of its step if these are asked for."""
    yield from wrapped(_conclusion(found))
    resized = "" if found.model == model_named(name) else ", resized"
    sizes, *others = found.heading()
    yield f"{name}{resized}: {sizes}"
    yield from others
    if says_layout:
        yield from _layout(found)
    yield ""
    yield Table(TITLES, found.rows())
    yield ""
    yield from found.totals()
    if has_parts:
        yield ""
        yield from _parts_lines(found)
    if not found.setup.stores_scores:
        yield "activations: without attention scores (--keep-scores adds them)"
    if chosen := _chosen(found):
        yield f"planned with {' '.join(chosen)}"
    yield from _omissions(found)


def sliced_lines(found: Plan, sliced: Plan) -> Lines:
    """What a plan that does not fit needs if logits are computed in slices, if that is less."""
    if sliced.peak_bytes < found.peak_bytes:
        fits = ", which fits" if sliced.fits else ", which does not fit either"
        peak = bytes_text(sliced.peak_bytes)
        yield ""
        yield from wrapped(f"Logits take a part of it: with --head-slices {SLICES} the peak is {peak}{fits}.")


def _chosen(found: Plan) -> list[str]:
    """What a plan has by default or as it was told: the kernel, and how ranks split sequences and communicate."""
    setup, devices = found.setup, found.setup.tensor * found.setup.replicas
    chosen = [f"--attention {found.attention}"] if found.attention else []
    chosen += ["--sequence-parallel"] * (setup.sequence_parallel and setup.tensor > 1)
    chosen += ["--overlap" if setup.overlaps else "--no-overlap"] * (devices > 1)
    return chosen + [f"--context-kind {setup.context_kind}"] * (setup.context > 1)


def _conclusion(found: Plan) -> str:
    """How long a step takes, how much of it is idle, and whether the memory is enough."""
    fullest = max(found.ranks, key=lambda rank: rank.peak_bytes)
    fits = {True: ", which fits", False: ", which does not fit", None: ""}[found.fits]
    memory = f"rank {fullest.rank} needs the most memory, {bytes_text(fullest.peak_bytes)}{fits}"
    idle = f"busiest rank is idle for {percent(found.makespan_bubble_ratio)} of"
    if found.step_seconds is None:
        return f"The {idle} a step, and {memory}."
    return f"A step takes {seconds_text(found.step_seconds)}, the {idle} it, and {memory}."


def _layout(found: Plan) -> Iterator[str]:
    """The line with the plan's own string, unless it is printed anyway."""
    if found.layout_string is None:
        yield f"layout: no string, since {found.schedule.name} does not have stage i on rank i modulo its ranks"
    elif not found.has_uneven_layout:
        yield f"layout: {found.layout_string}"


def _omissions(found: Plan) -> Lines:
    """The links that are used, what the numbers leave out, and how far off those of similar plans were."""
    yield from wrapped(_links(found))
    yield from wrapped(f"not counted: {'; '.join(uncounted(found.cluster))}")
    if missing := unpriced(found.model, found.setup):
        yield from wrapped(f"not priced: {'; '.join(missing)}")
    yield from wrapped(said(found.model, found.setup, found.cluster))


def _links(found: Plan) -> str:
    """Which ranks communicate within nodes, and which between them; "" where none do, and without a cluster."""
    if (cluster := found.cluster) is None:
        return ""
    crosses, groups = crossing(found.setup, len(found.ranks), cluster), cluster.groups
    link, network = (min(getattr(each, name) for each in groups) for name in ("link_bandwidth", "network_bandwidth"))
    rates = {False: ("within", link), True: ("between", network)}
    parts = []
    for is_far, (where, rate) in rates.items():
        if who := listed([RANKS[name] for name, far in crosses.items() if far == is_far]):
            slowest = ", on the slowest kind" if len(groups) > 1 else ""
            parts.append(f"{who} {where} nodes ({number(rate / 1e9)} GB/s of a device{slowest})")
    return f"links: {'; '.join(parts)}" if parts else ""


RANKS = {name: f"{name} ranks" for name in ("tensor", "context", "expert", "pipeline")} | {"data": "replicas"}


def _parts_lines(found: Plan) -> Lines:
    """The parts of one step with their shares, drawn as bars, and what each part is."""
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


def plan_svg(found: Plan) -> str:
    """The parts of a step as a bar."""
    return breakdowns_svg([(found.schedule.name, breakdown(found))])


def breakdowns_svg(bars: Sequence[tuple[str, Breakdown]]) -> str:
    """Named breakdowns, one below the other."""
    drawn = [Bar(name, each.parts) for name, each in bars]
    return bars_svg("Where the time of a step goes", drawn, [*MEANINGS], seconds_text)


def plan_json(found: Plan) -> dict[str, Any]:
    """The plan as JSON values."""
    derived = ("layers", "optimizer_bytes", "allocator_bytes", "peak_bytes")
    return {
        **_model_json(found),
        "parameters_total": found.parameters_total,
        "schedule": found.schedule.name,
        "microbatches": found.schedule.num_microbatches,
        "layout": asdict(found.setup)
        | {"pipeline": len(found.ranks), "sequence": found.sequence, "attention": found.attention},
        "devices": found.devices,
        "ranks": [asdict(rank) | {name: getattr(rank, name) for name in derived} for rank in found.ranks],
        "makespan_bubble_ratio": found.makespan_bubble_ratio,
        "even_makespan_bubble_ratio": found.even_makespan_bubble_ratio,
        "bubble_ratio": found.bubble_ratio,
        "makespan": found.timeline.makespan,
        "unit": "s" if found.has_seconds else "layer forwards",
        **_step_json(found),
        "outside_bytes": found.outside_bytes,
        "fits": found.fits,
        "similar_error": similar_error(found.model, found.setup, found.cluster),
        "tokens": found.tokens,
    }


def _model_json(found: Plan) -> dict[str, Any]:
    """What is planned, and what no number counts, which all layouts of a search share."""
    return {
        "model": asdict(found.model),
        "cluster": None if found.cluster is None else found.cluster.content(),
        "not_counted": uncounted(found.cluster),
        "not_priced": unpriced(found.model, found.setup),
    }


def _kinds_json(found: Plan) -> list[list[str]] | None:
    """Per pipeline rank, the names of the kinds of devices that it lies on."""
    if (mapped := found.device_map) is None:
        return None
    return [[kind.device.name for kind in mapped.on(rank)] for rank in range(len(found.ranks))]


def _step_json(found: Plan) -> dict[str, Any]:
    """The time and the memory of a step."""
    return {
        "layout_string": found.layout_string,
        "kinds": _kinds_json(found),
        "step_seconds": found.step_seconds,
        "step_parts": None if found.step_parts is None else found.step_parts._asdict(),
        "breakdown": None if found.step_parts is None else asdict(breakdown(found)),
        "tokens_per_second": found.tokens_per_second,
        "peak_bytes": found.peak_bytes,
        "peak_parts": found.peak_parts,
    }


MADE_FOR = ("cost", "bytes_cap", "candidates")  # options that a search for layouts gives to an order that it searches
SIZES = ("tensor", "pipeline", "data", "context", "expert", "microbatch_size", "microbatches")
CHOSEN = (*SIZES, "schedule", "checkpoint", "zero", "shard_ranks", "sequence_parallel", "overlap", "cut")


def search_json(found: Layouts, fewer: Layouts | None) -> dict[str, Any]:
    """The layouts of a search as JSON values, and the best one on fewer devices."""
    wanted, best = found.wanted, found.ranked[0]
    return {
        **_model_json(best.plan),
        "devices": wanted.devices,
        "batch": wanted.batch,
        "memory_bytes": wanted.limit,
        "tie": TIE,
        "simulated": found.simulated,
        "plainest": _sizes_json(found.plainest) | _step_json(found.plainest.plan),
        "fewer_devices": None
        if fewer is None
        else {
            "devices": fewer.wanted.devices,
            "step_seconds": fewer.ranked[0].step_seconds,
            **_sizes_json(fewer.ranked[0]),
        },
        "layouts": [
            _sizes_json(each)
            | _step_json(each.plan)
            | {"rank_bytes": [rank.peak_bytes for rank in each.plan.ranks], "more_than_first": each.grown(best)}
            for each in found.ranked
        ],
    }


def _sizes_json(found: Ranked) -> dict[str, Any]:
    """The layout; costs that a schedule was made for are left out."""
    named = {name: getattr(found.layout, name) for name in CHOSEN} | {"attention": found.plan.attention}
    return named | {"options": _options(found.layout)}


def _options(layout: Layout) -> dict[str, Any]:
    return {name: value for name, value in layout.options.items() if name not in MADE_FOR}


def _schedule_text(layout: Layout) -> str:
    """The schedule with its options, in a few letters: `x6` means six chunks."""
    if layout.pipeline == 1:
        return "no pipeline"
    options = _options(layout)
    chunks = options.pop("chunks", None)
    named = layout.schedule if chunks is None else f"{layout.schedule} x{chunks}"
    return ", ".join([named, *(f"{name} {value}" for name, value in options.items())])


def _zero_text(layout: Layout) -> str:
    """The ZeRO stage, and the replicas that it divides over, if not all."""
    return f"{layout.zero}" if layout.shard_ranks is None else f"{layout.zero} over {layout.shard_ranks}"


def _sizes_text(layout: Layout, *, has_context: bool) -> str:
    """The sizes tensor, pipeline and data, and the context ranks."""
    return f"{layout.tensor}x{layout.pipeline}x{layout.data}" + f"x{layout.context}" * has_context


def _sizes_in_words(layout: Layout) -> str:
    sizes = {"tensor": layout.tensor, "pipeline": layout.pipeline, "data": layout.data, "context": layout.context}
    return ", ".join(f"{name} {size}" for name, size in sizes.items() if name != "context" or size > 1)


def search_svg(found: Layouts, *, has_parts: bool) -> str:
    """The layouts as a plot of step time against memory, or the parts of their steps as bars."""
    names = [
        f"{place}: {_schedule_text(layout)} {_sizes_text(layout, has_context=layout.context > 1)}"
        for place, layout in enumerate((each.layout for each in found.ranked), start=1)
    ]
    if has_parts:
        return breakdowns_svg([(name, breakdown(each.plan)) for name, each in zip(names, found.ranked, strict=True)])
    points = [
        Point(name, each.plan.peak_bytes, each.step_seconds) for name, each in zip(names, found.ranked, strict=True)
    ]
    memory = Axis("memory of the fullest device", bytes_text, 1024)
    return scatter_svg(points, memory, Axis("time of a step (s)", number))


def search_lines(name: str, found: Layouts, fewer: Layouts | None, *, says_layout: bool, has_parts: bool) -> Lines:
    """The layouts of a search for the model `name`, with the layout string of the best one and the parts of all steps
    if these are asked for.
    """
    wanted, first = found.wanted, found.ranked[0].plan
    tokens = f"{wanted.batch:,} sequences of {first.sequence:,} tokens"
    fastest = found.ranked[0]
    sizes = f"{_schedule_text(fastest.layout)}, {_sizes_in_words(fastest.layout)}"
    yield from wrapped(f"The fastest layout takes {seconds_text(fastest.step_seconds)} a step: {sizes}.")
    yield f"{name}: {wanted.model.parameters:,} parameters, {tokens} a step"
    yield _devices(found)
    yield ""
    yield _search_table(found)
    yield ""
    yield _search_parts(found, in_detail=has_parts)
    yield ""
    yield from _fewer(found, fewer)
    yield from _search_notes(found)
    if says_layout:
        yield from _layout(first)


def _devices(found: Layouts) -> str:
    """How many devices of which kind a search has, and the most that each may hold."""
    wanted = found.wanted
    (kind, _), *others = taken = wanted.cluster.taken(wanted.devices)
    if not others:
        return f"{wanted.devices:,} devices {kind.device.name}, at most {bytes_text(wanted.limit)} on each"
    kinds = [
        f"{many:,} {each.device.name} in nodes of {each.devices_per_node} (at most {bytes_text(wanted.limit_of(each))})"
        for each, many in taken
    ]
    return f"{wanted.devices:,} devices: {listed(kinds)}"


def _search_table(found: Layouts) -> Table:
    layouts = [each.layout for each in found.ranked]
    has_context, has_experts = any(each.context > 1 for each in layouts), any(each.expert > 1 for each in layouts)
    has_zeros = any(each.zero > 1 for each in layouts)
    titles = [
        "",
        "schedule",
        "tensor x\npipeline x\ndata" + " x\ncontext" * has_context,
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
            _schedule_text(each.layout),
            _sizes_text(each.layout, has_context=has_context),
            *[str(each.layout.expert)] * has_experts,
            f"{each.layout.microbatches}x{each.layout.microbatch_size}",
            "scores" if each.layout.checkpoint == "selective" else each.layout.checkpoint,
            *[_zero_text(each.layout)] * has_zeros,
            seconds_text(each.step_seconds),
            number(each.plan.tokens_per_second or 0.0),
            bytes_text(each.plan.peak_bytes),
        ]
        for place, each in enumerate(found.ranked, start=1)
    ]
    return Table(titles, rows)


def _search_parts(found: Layouts, *, in_detail: bool) -> Table:
    """The parts of the steps: a line for each layout, or in detail, a column for each."""
    places = [str(place) for place in range(1, len(found.ranked) + 1)]
    if not in_detail:
        rows = [[place, *map(seconds_text, each.parts)] for place, each in zip(places, found.ranked, strict=True)]
        return Table(["", *found.ranked[0].parts._fields], rows)
    every = [breakdown(each.plan).parts for each in found.ranked]
    names = [name for name in MEANINGS if any(name in parts for parts in every)]
    rows = [[name, *(seconds_text(parts[name]) if name in parts else "-" for parts in every)] for name in names]
    return Table(["", *places], rows)


def _ties(found: Layouts) -> Lines:
    """Which layouts are about as fast as the first one, and the plainest within as much, if it is another one."""
    first, plain = found.ranked[0], found.plainest
    tied = sum(each.step_seconds <= first.step_seconds * (1 + TIE) for each in found.ranked)
    if tied > 1:
        yield f"Times of 1-{tied} are within {TIE:.0%}, which is a tie."
    if plain.layout is first.layout:
        yield f"1 is also the plainest of all layouts within {TIE:.0%}."
        return
    place = next((f"{place}: " for place, each in enumerate(found.ranked, start=1) if each is plain), "")
    slower = plain.step_seconds / first.step_seconds - 1
    memory = bytes_text(plain.plan.peak_bytes)
    yield from wrapped(
        f"{slower:.1%} slower than 1 and plainer ({', '.join(plainer(plain.layout, first.layout))}): {place}"
        f"{described(plain.layout)}; {seconds_text(plain.step_seconds)}, {memory}."
    )


def _search_notes(found: Layouts) -> Lines:
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
    if wanted.shard_ranks is None and (shards := {each.layout.shard_ranks for each in found.ranked} - {None}):
        names = " or ".join(f"3 over {ranks}" for ranks in sorted(filter(None, shards)))
        yield from wrapped(f"{names}: the replicas of a node divide the weights (--shard-ranks); others have copies.")
    yield from wrapped(" ".join(_split(found)))
    if not first.layout.setup.stores_scores and first.plan.attention:
        yield f"All with --attention {first.plan.attention}."
    if (mapped := first.plan.device_map) is not None and len(mapped.kinds) > 1:
        yield from wrapped(f"Stages of 1: {mapped.described(first.plan.schedule.placement)}")
    cut = first.layout.cut
    if cut != even_cut(wanted.model.layers, len(cut)):
        yield from wrapped(f"Layers per stage of 1: {' '.join(str(end - start) for start, end in cut)}")
        if first.plan.has_uneven_layout:
            yield f"layout: {first.plan.layout_string}"
    yield from _omissions(first.plan)


def _split(found: Layouts) -> Iterator[str]:
    """What the search chose for its layouts beside sizes, unless the command says it."""
    setups, wanted = [each.layout.setup for each in found.ranked], found.wanted
    if where := _places(each.sequence_parallel for each in setups if wanted.sequence_parallel is None):
        yield f"Tensor ranks split the sequence, too (--sequence-parallel){where}."
    if where := _places(each.overlaps and each.tensor * each.replicas > 1 for each in setups if wanted.overlap is None):
        yield f"Communication runs beside computations (--overlap){where}."
    for kind in get_args(ContextKind):
        if where := _places(each.context > 1 and each.context_kind == kind for each in setups):
            yield f"Context ranks: --context-kind {kind}{where}."


def _places(chosen: Iterable[bool]) -> str:
    """In which layouts something was chosen, by their numbers; "" for none."""
    every = list(chosen)
    places = ", ".join(str(place) for place, is_chosen in enumerate(every, start=1) if is_chosen)
    return f" in {'all' if all(every) else places}" if places else ""


def _fewer(found: Layouts, fewer: Layouts | None) -> Lines:
    """That fewer devices are faster, if they are."""
    if fewer is None:
        return
    first, devices = fewer.ranked[0], fewer.wanted.devices
    sizes = f"{_sizes_text(first.layout, has_context=False)} with {_schedule_text(first.layout)}"
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


def replan_json(found: Replan) -> dict[str, object]:
    """Other schedules for a measured step, as JSON values."""

    def one(each: Candidate) -> dict[str, object]:
        return {
            "schedule": each.schedule.name,
            "step_seconds": each.timeline.makespan,
            "gain": found.gain(each),
            "peak_activations": each.timeline.peak_activations,
            "fits": each.fits,
        }

    return {
        "measured_seconds": found.measured.makespan,
        "now": one(found.now),
        "best": one(found.best),
        "candidates": [one(each) for each in found.candidates],
    }


def replan_lines(found: Replan) -> Lines:
    """Other schedules for a measured step, in a table, and what to do."""
    unit, planned, measured = Unit.of([found.measured]), found.now.timeline.makespan, found.measured.makespan
    best = found.best
    if best is found.now:
        yield from wrapped(f"No schedule within the same memory is faster than {found.measured.name}.")
    else:
        gain = percent(found.gain(best))
        yield from wrapped(f"{best.schedule.name} would save {gain} of the step within the same memory.")
    yield ""
    yield f"{found.measured.name}: measured {unit.text(measured)}, planned from its own costs {unit.text(planned)}"
    yield "The table compares the schedules with the same stages on the same ranks, under the measured costs."
    yield ""
    rows = [
        [
            each.schedule.name,
            unit.text(each.timeline.makespan),
            percent(found.gain(each)),
            number(max(each.timeline.peak_activations)),
            "" if each.fits else "more",
        ]
        for each in found.candidates
    ]
    yield Table(["schedule", "step", "gain", "activations", "memory"], rows)
    if best is not found.now:
        yield ""
        yield "--csv FILE writes it; Schedule.from_csv reads it, and execute_pipeline(schedule=...) runs it."
