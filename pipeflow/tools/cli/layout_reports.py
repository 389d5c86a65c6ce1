"""What is printed of a search for layouts: lines with tables, JSON values, and pictures. All of them tell of the
recommended layout, and name the fastest beside it. Must not contain: what is printed of one plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, get_args

from pipeflow.core.text import bytes_text, listed, number, seconds_text
from pipeflow.draw import Axis, Point, Table, scatter_svg
from pipeflow.planning.cuts import even_cut
from pipeflow.planning.estimate import MEANINGS, breakdown
from pipeflow.planning.layout import Layout
from pipeflow.planning.layout_ties import TIE, plainer
from pipeflow.planning.layouts import Layouts, Ranked
from pipeflow.planning.setup import ContextKind
from pipeflow.tools.cli.outputs import wrapped
from pipeflow.tools.cli.plan_reports import Lines, breakdowns_svg, layout_lines, model_json, omissions, step_json
from pipeflow.tools.cli.plan_use import Planned

MADE_FOR = ("cost", "bytes_cap", "candidates")  # options that a search for layouts gives to an order that it searches
SIZES = ("tensor", "pipeline", "data", "context", "expert", "microbatch_size", "microbatches")
CHOSEN = (*SIZES, "schedule", "checkpoint", "zero", "shard_ranks", "sequence_parallel", "overlap", "cut")


def search_json(found: Layouts, fewer: Layouts | None) -> dict[str, Any]:
    """The layouts of a search as JSON values, the recommended one of them, and that on fewer devices."""
    wanted, best = found.wanted, found.recommended
    return {
        **model_json(best.plan),
        "devices": wanted.devices,
        "batch": wanted.batch,
        "memory_bytes": wanted.limit,
        "tie": TIE,
        "simulated": found.simulated,
        "recommended": {"place": _place(found), **_sizes_json(best), **step_json(best.plan)},
        "gain_of_fastest": _gain(found),
        "fewer_devices": None
        if fewer is None
        else {
            "devices": fewer.wanted.devices,
            "step_seconds": fewer.recommended.step_seconds,
            **_sizes_json(fewer.recommended),
        },
        "layouts": [
            _sizes_json(each)
            | step_json(each.plan)
            | {
                "rank_bytes": [rank.peak_bytes for rank in each.plan.ranks],
                "more_than_first": each.grown(found.fastest),
            }
            for each in found.listed
        ],
    }


def to_use(found: Layouts) -> list[Planned]:
    """The layouts in the order in which they are to be used, with their places in the list."""
    places = {id(each): place for place, each in enumerate(found.listed, start=1)}
    return [Planned(each.plan, each.layout.options, places[id(each)]) for each in found.preferred]


def _place(found: Layouts) -> int:
    """The place of the recommended layout in the list, from 1."""
    return to_use(found)[0].place


def _gain(found: Layouts) -> float:
    """By which share the step of the fastest layout is shorter than that of the recommended one."""
    return 1 - found.fastest.step_seconds / found.recommended.step_seconds


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


def _in_words(layout: Layout) -> str:
    """The schedule and the sizes."""
    sizes = {"tensor": layout.tensor, "pipeline": layout.pipeline, "data": layout.data, "context": layout.context}
    named = (f"{name} {size}" for name, size in sizes.items() if name != "context" or size > 1)
    return ", ".join([_schedule_text(layout), *named])


def _marked(found: Layouts) -> list[tuple[str, Layout]]:
    """The layouts with their places in the list; the recommended one has a star."""
    return [
        (f"{place}{'*' * (each is found.recommended)}", each.layout) for place, each in enumerate(found.listed, start=1)
    ]


def search_svg(found: Layouts, *, has_parts: bool) -> str:
    """The layouts as a plot of step time against memory, or the parts of their steps as bars."""
    names = [
        f"{place}: {_schedule_text(layout)} {_sizes_text(layout, has_context=layout.context > 1)}"
        for place, layout in _marked(found)
    ]
    if has_parts:
        return breakdowns_svg([(name, breakdown(each.plan)) for name, each in zip(names, found.listed, strict=True)])
    points = [
        Point(name, each.plan.peak_bytes, each.step_seconds) for name, each in zip(names, found.listed, strict=True)
    ]
    memory = Axis("memory of the fullest device", bytes_text, 1024)
    return scatter_svg(points, memory, Axis("time of a step (s)", number))


def search_lines(name: str, found: Layouts, fewer: Layouts | None, *, says_layout: bool, has_parts: bool) -> Lines:
    """The layouts of a search for the model `name`, with the layout string of the recommended one and the parts of all
    steps if these are asked for.
    """
    wanted, best = found.wanted, found.recommended.plan
    tokens = f"{wanted.batch:,} sequences of {best.sequence:,} tokens"
    yield from wrapped(_conclusion(found))
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
        yield from layout_lines(best)


def _conclusion(found: Layouts) -> str:
    """The recommended layout, and what the fastest one would gain."""
    best, fastest = found.recommended, found.fastest
    said = f"The recommended layout takes {seconds_text(best.step_seconds)} a step: {_in_words(best.layout)}."
    if best is fastest:
        return f"{said} No layout is faster."
    gain = f"takes {seconds_text(fastest.step_seconds)}, {_gain(found):.1%} less: {_in_words(fastest.layout)}"
    return f"{said} The fastest {gain}."


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
    layouts = [each.layout for each in found.listed]
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
            place,
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
        for (place, _), each in zip(_marked(found), found.listed, strict=True)
    ]
    return Table(titles, rows)


def _search_parts(found: Layouts, *, in_detail: bool) -> Table:
    """The parts of the steps: a line for each layout, or in detail, a column for each."""
    places = [place for place, _ in _marked(found)]
    if not in_detail:
        rows = [[place, *map(seconds_text, each.parts)] for place, each in zip(places, found.listed, strict=True)]
        return Table(["", *found.fastest.parts._fields], rows)
    every = [breakdown(each.plan).parts for each in found.listed]
    names = [name for name in MEANINGS if any(name in parts for parts in every)]
    rows = [[name, *(seconds_text(parts[name]) if name in parts else "-" for parts in every)] for name in names]
    return Table(["", *places], rows)


def _ties(found: Layouts) -> Lines:
    """Which layouts are about as fast as the first one, and why one of them is recommended."""
    best, first = found.recommended, found.fastest
    tied = sum(each.step_seconds <= first.step_seconds * (1 + TIE) for each in found.listed)
    if tied > 1:
        yield f"Times of 1-{tied} are within {TIE:.0%}, which is a tie."
    if best is first:
        yield f"1* is recommended: it is the fastest, and the plainest within {TIE:.0%}."
        return
    slower, why = best.step_seconds / first.step_seconds - 1, ", ".join(plainer(best.layout, first.layout))
    yield from wrapped(f"{_place(found)}* is recommended: {slower:.1%} slower than 1 and plainer ({why}).")


def _search_notes(found: Layouts) -> Lines:
    best, wanted, shown = found.recommended, found.wanted, found.listed
    for place, each in enumerate(shown[1:], start=2):
        yield from wrapped(_why(place, each, found.fastest))
    yield from _ties(found)
    if wanted.tensor is None or wanted.pipeline is None:
        beside = "" if len(shown) == len(found.ranked) else f" but {_place(found)}*"
        yield f"Each row{beside} has other sizes; --tensor and --pipeline together compare schedules."
    if any("chunks" in each.layout.options for each in shown):
        yield "x2: two stages per rank, and so on."
    if any(each.layout.zero == 1 for each in shown) and wanted.zero is None:
        yield "ZeRO-1 splits the optimizer state wherever there are replicas."
    if wanted.shard_ranks is None and (shards := {each.layout.shard_ranks for each in shown} - {None}):
        names = " or ".join(f"3 over {ranks}" for ranks in sorted(filter(None, shards)))
        yield from wrapped(f"{names}: the replicas of a node divide the weights (--shard-ranks); others have copies.")
    yield from wrapped(" ".join(_split(found)))
    if not best.layout.setup.stores_scores and best.plan.attention:
        yield f"All with --attention {best.plan.attention}."
    if (mapped := best.plan.device_map) is not None and len(mapped.kinds) > 1:
        yield from wrapped(f"Stages of {_place(found)}: {mapped.described(best.plan.schedule.placement)}")
    cut = best.layout.cut
    if cut != even_cut(wanted.model.layers, len(cut)):
        yield from wrapped(f"Layers per stage of {_place(found)}: {' '.join(str(end - start) for start, end in cut)}")
        if best.plan.has_uneven_layout:
            yield f"layout: {best.plan.layout_string}"
    yield from omissions(best.plan)


def _split(found: Layouts) -> Iterator[str]:
    """What the search chose for its layouts beside sizes, unless the command says it."""
    setups, wanted = [each.layout.setup for each in found.listed], found.wanted
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
    best, devices = fewer.recommended, fewer.wanted.devices
    sizes = f"{_sizes_text(best.layout, has_context=False)} with {_schedule_text(best.layout)}"
    saved = 1 - best.step_seconds / found.recommended.step_seconds
    yield from wrapped(
        f"Fewer devices are faster here: {devices} take {seconds_text(best.step_seconds)} for a step ({sizes}), "
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
