"""What is printed of plans: one layout, and what other schedules would gain for a measured step, as lines with tables,
as JSON values, and as pictures. Must not contain: what is printed of a search (`layout_reports`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from pipeflow.core.text import bytes_text, listed, number, percent, seconds_text
from pipeflow.draw import Bar, Table, bars_svg
from pipeflow.draw.captions import Unit
from pipeflow.planning.catalog import MODELS
from pipeflow.planning.device_map import crossing
from pipeflow.planning.estimate import MEANINGS, Breakdown, breakdown
from pipeflow.planning.replanning import Candidate, Replan
from pipeflow.planning.similar import said, similar_error, uncounted, unpriced
from pipeflow.planning.step_plan import TITLES, Plan
from pipeflow.tools.cli.outputs import wrapped

Lines = Iterator[Table | str]
LONGEST = 24  # letters of a bar in a terminal
SLICES = 8  # of tokens in which logits are computed, where they are proposed


def plan_lines(name: str, found: Plan, *, says_layout: bool, has_parts: bool) -> Lines:
    """The plan of the model `name`, with its layout string and the parts of its step if these are asked for."""
    yield from wrapped(_conclusion(found))
    resized = ", resized" if name in MODELS and found.model != MODELS[name] else ""
    sizes, *others = found.heading()
    yield f"{name}{resized}: {sizes}"
    yield from others
    if says_layout:
        yield from layout_lines(found)
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
    yield from omissions(found)


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


def layout_lines(found: Plan) -> Iterator[str]:
    """The line with the plan's own string, unless it is printed anyway."""
    if found.layout_string is None:
        yield f"layout: no string, since {found.schedule.name} does not have stage i on rank i modulo its ranks"
    elif not found.has_uneven_layout:
        yield f"layout: {found.layout_string}"


def omissions(found: Plan) -> Lines:
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
        **model_json(found),
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
        **step_json(found),
        "outside_bytes": found.outside_bytes,
        "fits": found.fits,
        "similar_error": similar_error(found.model, found.setup, found.cluster),
        "tokens": found.tokens,
    }


def model_json(found: Plan) -> dict[str, Any]:
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


def step_json(found: Plan) -> dict[str, Any]:
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
