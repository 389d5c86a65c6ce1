"""`pipeflow simulate`: the measures of a timeline."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import TYPE_CHECKING

from pipeflow.analysis.measures import path_times, stream_times
from pipeflow.cli.options import cost_options, schedule_argument, schedule_options, unit_options
from pipeflow.cli.request import Request
from pipeflow.cli.sources import sound_source
from pipeflow.core.dataflow import Stream
from pipeflow.core.text import bytes_text, number, percent
from pipeflow.core.timeline import Timeline
from pipeflow.draw.times import Unit

if TYPE_CHECKING:
    from pipeflow.cli.options import Commands


def add_to(commands: Commands) -> None:
    """Adds the command and its options."""
    parents = [schedule_argument(), schedule_options(), cost_options(), unit_options()]
    command = commands.add_parser("simulate", help="print the measures of a timeline", parents=parents)
    command.add_argument("--json", action="store_true", help="print JSON, in the timeline's own unit of time")
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Prints the makespan, bubble, peaks and transfers of a schedule or a timeline."""
    request = Request.of(arguments)
    timeline = sound_source(arguments.schedule, request).timeline(request.costs)
    if arguments.json:
        import json

        print(json.dumps(_measures(timeline)))
    else:
        texts = _texts(timeline, arguments.unit, arguments.factor)
        width = max(map(len, texts))
        for name, text in texts.items():
            print(f"{name:{width}}  {text}")
    return 0


def _measures(timeline: Timeline) -> dict[str, object]:
    by_rank, beside, waiting = path_times(timeline)
    others = {stream.value: time for stream, time in beside.items()}
    return {
        **({"unit": timeline.unit} if timeline.unit else {}),
        "makespan": timeline.makespan,
        "span": timeline.span,
        "makespan_bubble_ratio": timeline.makespan_bubble_ratio,
        "bubble_ratio": timeline.bubble_ratio,
        "idle": _idle(timeline),
        "peak_activations": timeline.peak_activations,
        **({"peak_bytes": timeline.peak_bytes} if timeline.saved_bytes else {}),
        **({"exposed": timeline.exposed} if beside else {}),
        "critical_path": {"computing": sum(by_rank), **others, "waiting": waiting, "computing_by_rank": by_rank},
    }


def _idle(timeline: Timeline) -> list[float]:
    """Per rank, the time of the makespan in which it does not compute."""
    busy = (sum(span.end - span.start for span in row) for row in timeline.on(Stream.COMPUTE))
    return [timeline.makespan - each for each in busy]


def _texts(timeline: Timeline, unit: str, factor: float) -> dict[str, str]:
    written = Unit.of([timeline], unit, factor)

    def time(value: float) -> str:
        return f"{value * written.factor:.6g} {written.name}".rstrip()

    def times(values: Iterable[float]) -> str:
        return f"{' '.join(f'{each * written.factor:.4g}' for each in values)} {written.name}".rstrip()

    by_rank, beside, waiting = path_times(timeline)
    most = stream_times(timeline)
    others = [f"{stream} {time(each)}" for stream, each in beside.items()]
    part = percent(waiting / timeline.makespan if timeline.makespan else 0.0)
    path = [f"computing {time(sum(by_rank))}", *others, f"waiting {time(waiting)} ({part})"]
    exposed = time(timeline.exposed)
    streams = {stream.value: f"{time(most.get(stream, 0.0))}, exposed {exposed}" for stream in beside}
    return {
        "makespan": time(timeline.makespan),
        "span": time(timeline.span),
        "bubble": f"{percent(timeline.makespan_bubble_ratio)} of the makespan, in which the busiest rank is idle",
        "bubble of span": percent(timeline.bubble_ratio),
        "idle by rank": times(_idle(timeline)),
        "peak activations": " ".join(map(number, timeline.peak_activations)),
        **({"peak memory": "  ".join(map(bytes_text, timeline.peak_bytes))} if timeline.saved_bytes else {}),
        **streams,
        "critical path": ", ".join(path),
        "  by rank": times(by_rank),
    }
