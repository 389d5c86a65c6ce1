"""`pipeflow plan --measured FILE`: other schedules under the costs of a measured step."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import TYPE_CHECKING

from pipeflow.cli.files import write
from pipeflow.cli.outputs import show
from pipeflow.cli.progress import doing
from pipeflow.core.errors import UsageError
from pipeflow.core.files import read_text
from pipeflow.core.text import number, percent
from pipeflow.core.timeline import Timeline
from pipeflow.draw.times import Unit
from pipeflow.planning.replanning import Candidate, Replan, replan

if TYPE_CHECKING:
    from pipeflow.draw import Table


def run(arguments: argparse.Namespace) -> int:
    """Prints what other schedules would gain, and writes the best one where --csv says."""
    text = read_text(arguments.measured)
    try:
        measured = Timeline.from_json(text)
    except UsageError as error:
        raise UsageError(f"{arguments.measured}: {error}") from None
    with doing("planning"):
        found = replan(measured)
    if arguments.csv is not None:
        write({arguments.csv: found.best.schedule.to_csv()})
    if arguments.json:
        import json

        print(json.dumps(_for_programs(found)))
    else:
        show(*_heading(found), "", _table(found), "", *_advice(found))
    return 0


def _for_programs(found: Replan) -> dict[str, object]:
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


def _heading(found: Replan) -> Iterator[str]:
    unit, planned, measured = _unit(found), found.now.timeline.makespan, found.measured.makespan
    yield f"{found.measured.name}: measured {unit.text(measured)}, planned from its own costs {unit.text(planned)}"
    yield "The table compares the schedules with the same stages on the same ranks, under the measured costs."


def _unit(found: Replan) -> Unit:
    return Unit.of([found.measured])


def _table(found: Replan) -> Table:
    from pipeflow.draw import Table

    unit = _unit(found)
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
    return Table(["schedule", "step", "gain", "activations", "memory"], rows)


def _advice(found: Replan) -> Iterator[str]:
    best = found.best
    if best is found.now:
        yield f"No schedule within the same memory is faster than {found.measured.name}."
        return
    yield f"{best.schedule.name} would save {percent(found.gain(best))} of the step within the same memory."
    yield "--csv FILE writes it; Schedule.from_csv reads it, and execute_pipeline(schedule=...) runs it."
