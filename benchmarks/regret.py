"""How good a choice the planner makes: its regret for each published job that was measured in several layouts, and the
place that a search gives to sizes which a publisher chose.

Regret: by how much the chosen layout was slower than the fastest measured one of the same job. A job is a model, a
number of devices, a batch, a precision and a release of the program. The chosen layout is what a search names: the
plainest of those that are planned within TIE of the fastest. Beside it stands the regret of the fastest planned one,
which a search lists first. A place counts layouts of distinct sizes: tensor, pipeline and context ranks, and replicas.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any, NamedTuple

from benchmarks.measured_steps import Row, rows
from benchmarks.planner_fit import own_coefficients
from benchmarks.report import Report
from pipeflow import Setup
from pipeflow.planning.layout import Layout, Wanted
from pipeflow.planning.layout_ties import plainest, ranking
from pipeflow.planning.layouts import find_layouts

COLUMNS = ["", "jobs", "regret", "largest", "of the first", "largest"]
LARGE = 0.1  # regrets above this are shown
TOP = 10  # layouts that are listed to find a place
NVIDIA, NANOTRON = ("1f1b", "interleaved-1f1b"), ("1f1b",)  # the schedules of a program
PUBLISHED = (  # steps whose sizes a search is asked for: source, layers, devices, precision
    *(
        ("dgxc-h100", *job, precision, NVIDIA)
        for job in ((32, 64), (80, 64), (126, 576))
        for precision in ("bf16", "fp8")
    ),
    *(("nanotron", layers, 8, "bf16-mixed", NANOTRON) for layers in (16, 28, 32)),
    *(("nanotron", layers, 64, "bf16-mixed", NANOTRON) for layers in (16, 28, 32, 80)),
)


class Regret(NamedTuple):
    """What the choice of a layout cost in one job.

    Attributes:
        chosen: by how much the layout that a search names is slower than the fastest, as a share of that.
        first: the same for the layout that is planned to be the fastest.
        picked, best: the row of the layout that a search names, and the fastest measured one, as places.
        rows: the places of all rows of the job.
    """

    chosen: float
    first: float
    picked: int
    best: int
    rows: tuple[int, ...]


def regrets(chosen: Sequence[Row], predicted: Sequence[float]) -> list[Regret]:
    """The regret of each job among these rows that was measured in several layouts. `predicted` has their seconds."""
    jobs: defaultdict[object, list[int]] = defaultdict(list)
    for index, row in enumerate(chosen):
        jobs[row.task].append(index)
    return [
        _regret(chosen, predicted, job) for job in jobs.values() if _differ([chosen[index].layout for index in job])
    ]


def _differ(layouts: Sequence[Layout]) -> bool:
    """Whether they are not all the same one, measured again."""
    return any(layout != layouts[0] for layout in layouts)


def _regret(chosen: Sequence[Row], predicted: Sequence[float], job: Sequence[int]) -> Regret:
    timed = ranking((float(predicted[index]), chosen[index].layout) for index in job)
    picked, first = (
        next(index for index in job if chosen[index].layout is layout) for layout in (plainest(timed)[1], timed[0][1])
    )
    best = min(job, key=lambda index: chosen[index].seconds)
    lost, of_first = (chosen[index].seconds / chosen[best].seconds - 1 for index in (picked, first))
    return Regret(lost, of_first, picked, best, tuple(job))


class Place(NamedTuple):
    """Where a search has the sizes of a published step.

    Attributes:
        place: among layouts of distinct sizes, from 1; None after TOP.
        slower: by how much these sizes are planned slower than the first.
    """

    place: int | None
    slower: float


def place_of(row: Row, schedules: tuple[str, ...], top: int = TOP) -> Place:
    """The place of a row's sizes in a search for its job with these schedules."""
    setup, batch = row.setup, row.microbatches * row.setup.microbatch_size * row.setup.data
    given = Setup(sequence=setup.sequence, precision=setup.precision, attention=setup.attention)
    named: Any = {"schedules": schedules, "slices": 1}  # the engines of these jobs cut no sequences
    task = Wanted(row.model, row.cluster, row.devices, batch, setup=given, overlap=setup.overlap, **named)
    found = find_layouts(task, top=top).ranked
    times = {_sizes(each.layout): each.step_seconds for each in found}
    sizes = _sizes(row.layout)
    if sizes in times:
        return Place(list(times).index(sizes) + 1, times[sizes] / found[0].step_seconds - 1)
    tensor, pipeline, _, context = sizes
    own = find_layouts(replace(task, tensor=tensor, pipeline=pipeline, context=context), top=1).ranked[0]
    return Place(None, own.step_seconds / found[0].step_seconds - 1)


def _sizes(layout: Layout) -> tuple[int, ...]:
    return layout.tensor, layout.pipeline, layout.data, layout.context


def published() -> Iterator[tuple[Row, tuple[str, ...]]]:
    """The fastest published step of each job in PUBLISHED, with the schedules of the program."""
    every = rows()
    for source, layers, devices, precision, schedules in PUBLISHED:
        job = source, layers, devices, precision
        found = [row for row in every if (row.source, row.model.layers, row.devices, row.setup.precision.name) == job]
        yield min(found, key=lambda row: row.seconds), schedules


def run(rounds: int | None = None) -> Report:
    """The tables; `rounds` does not matter, since nothing is measured here."""
    every, known = rows(), own_coefficients()
    report = Report("regret", "regret of the planner's choice among published layouts of a job", COLUMNS)
    total: list[Regret] = []
    for source in dict.fromkeys(row.source for row in every):
        chosen = [row for row in every if row.source == source]
        predicted = [row.predicted(known) for row in chosen]
        if found := regrets(chosen, predicted):
            report.rows.append(_line(source, found))
            total += found
        large = [each for each in found if each.chosen > LARGE]
        report.notes += [_shown(each, chosen, predicted) for each in large]
    report.rows.append(_line("all jobs", total))
    report.data["regrets"] = {"jobs": len(total), "mean": fmean(each.chosen for each in total)}
    for row, schedules in published():
        at = place_of(row, schedules)
        job = f"{row.source}, {row.model.layers} layers on {row.devices} ({row.setup.precision.name}), {_text(row)}"
        place = at.place or f"after {TOP}"
        report.notes.append(f"{job}: place {place}, planned {at.slower:+.1%} beside the first")
    return report


def _line(name: str, found: Sequence[Regret]) -> list[str]:
    parts = [each.chosen for each in found], [each.first for each in found]
    return [name, str(len(found)), *(f"{100 * number(part):.1f} %" for part in parts for number in (fmean, max))]


def _shown(each: Regret, chosen: Sequence[Row], predicted: Sequence[float]) -> str:
    """A job whose choice lost much: the chosen and the fastest layout."""
    row = chosen[each.best]
    both = (
        f"{_text(chosen[index])}: planned {predicted[index]:.3f} s, measured {chosen[index].seconds:.3f} s"
        for index in (each.picked, each.best)
    )
    job = f"{row.source}, {row.model.layers} layers of {row.model.hidden} on {row.devices}"
    return f"{job}: {each.chosen:.1%}, {'; fastest '.join(both)}"


def _text(row: Row) -> str:
    setup = row.setup
    shards = f" over {setup.shard_ranks}" if setup.shard_ranks else ""
    return (
        f"tensor {setup.tensor} x pipeline {row.pipeline} x context {setup.context} x data {setup.data}, "
        f"microbatches of {setup.microbatch_size}, ZeRO-{setup.zero}{shards}"
    )
