"""Jobs: how `pipeflow explain` prints a step of a job without a pipeline."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pipeflow.core.text import number
from pipeflow.draw import Table
from pipeflow.draw.captions import Unit
from pipeflow.tools.cli.conclusions import stands_out
from pipeflow.tools.cli.outputs import wrapped
from pipeflow.tools.traces.jobs import Job
from pipeflow.tools.traces.rank_times import PARTS

FROM = {
    "mark": "step, from its mark to the next one",
    "update": "step, from the end of one optimizer step to the next",
    "recording": "the recording",
}


def job_for_programs(found: Job) -> dict[str, Any]:
    """The JSON of a job; times are in seconds."""
    return {
        "pipeline": False,
        "step_seconds": found.seconds,
        "steps": found.step_seconds,
        "steps_by": found.by,
        "ranks": [
            {
                "rank": each.rank,
                "on_device": each.on_device,
                "seconds": each.seconds,
                "parts": [
                    {"kind": kind, "cause": cause, "seconds": seconds} for (kind, cause), seconds in each.parts.items()
                ],
                "communications": [one._asdict() for one in each.communications],
            }
            for each in found.ranks
        ],
        "findings": [each._asdict() for each in found.findings],
        "notes": found.notes,
    }


def job_lines(found: Job, unit: Unit) -> Iterator[Any]:
    """The lines that tell a job."""
    most = max(found.findings, key=lambda each: each.seconds, default=None)
    yield from wrapped(f"A step takes {unit.text(found.seconds)}; {stands_out(most and most.text)}.")
    many = len(found.ranks)
    who = "1 rank, which sends to no" if many == 1 else f"{many} ranks, none of which sends to a"
    who += " single other one"
    if any(one.kind == "send/receive" for each in found.ranks for one in each.communications):
        who = f"{many} ranks, all of whose sends are parts of their forwards and backwards"
    yield from wrapped(f"no pipeline shows: {who}")
    steps = sorted(found.step_seconds)
    several = f", the median of {len(steps)}, from {unit.text(steps[0])} to {unit.text(steps[-1])}" * (len(steps) > 1)
    yield from wrapped(f"{FROM[found.by]}: {unit.text(found.seconds)}{several}")
    if found.outliers:
        late = " and ".join(str(each + 1) for each in found.outliers)
        yield f"  much longer: recorded step {late} of {len(steps)}"
    yield ""
    where = "device" if all(each.on_device for each in found.ranks) else "host"
    yield f"Times of the {where} of each rank{f' in {unit.name}' if unit.name else ''}, which sum up to its step:"
    yield _parts(found, unit)
    if any(each.communications for each in found.ranks):
        yield ""
        yield "Communication of each rank, also while it computes:"
        yield _communications(found, unit)
    yield ""
    if found.findings:
        yield "What stands out:"
        yield from (line for each in found.findings for line in wrapped(f"{unit.text(each.seconds)}: {each.text}"))
    else:
        yield "Nothing stands out: little time is lost between computations."
    for note in found.notes:
        yield from wrapped(f"note: {note}")


def _parts(found: Job, unit: Unit) -> Table:
    kinds = [kind for kind in PARTS if any(each.part(kind) for each in found.ranks)]
    rows = [
        [str(each.rank), *(number(each.part(kind) * unit.factor) for kind in kinds), number(each.seconds * unit.factor)]
        for each in found.ranks
    ]
    return Table(["rank", *kinds, "step"], rows)


def _communications(found: Job, unit: Unit) -> Table:
    rows = [
        [
            str(each.rank),
            one.kind,
            str(one.calls),
            *(number(time * unit.factor) for time in (one.seconds, one.hidden, one.seconds - one.hidden)),
        ]
        for each in found.ranks
        for one in each.communications
    ]
    return Table(["rank", "kind", "calls", "runs", "hidden", "exposed"], rows)
