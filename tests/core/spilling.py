"""Checks of a package whose table has two more rows: writing what a forward saved to a disk (D), and fetching it
(G), on a stream of their own. `test_new_kind` adds the rows to a copy of the package and runs each check there:
`python spilling.py CHECK`.
"""

from __future__ import annotations

import json
import sys
from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console

from pipeflow import (
    Action,
    CostModel,
    Kind,
    Pair,
    Schedule,
    Timeline,
    causes,
    critical_path,
    dependency_graph,
    lower,
    make_schedule,
    search,
    simulate,
    verify,
)
from pipeflow.core.action import Entry
from pipeflow.core.analysis.measured_step import executed_schedule, measured_costs
from pipeflow.core.cost import even_costs
from pipeflow.core.dataflow import Content, Stream
from pipeflow.core.soundness.transfers import verify_programs
from pipeflow.draw import CriticalPath, Gantt, html, perfetto, svg
from pipeflow.tools.cli.command import main
from pipeflow.tools.explore.answers import python
from pipeflow.tools.explore.state import State

SPILL, FETCH, DISK, FILE = Kind("D"), Kind("G"), Stream("disk"), Content("on the disk")


def spilled(plain: Schedule) -> Schedule:
    """Every microbatch's saved values go to a disk after its forward, and come back before its backward."""

    def around(entry: Entry) -> tuple[Entry, ...]:
        if isinstance(entry, Pair) or entry.kind not in (Kind.F, Kind.B, Kind.I):
            return (entry,)
        if entry.kind is Kind.F:
            return entry, Action(SPILL, entry.stage, entry.microbatch)
        return Action(FETCH, entry.stage, entry.microbatch), entry

    return replace(plain, rows=tuple(tuple(chain.from_iterable(map(around, row))) for row in plain.rows))


PLAIN = make_schedule("gpipe", ranks=2, microbatches=4)
SCHEDULE = spilled(PLAIN)
COST = replace(
    CostModel.even(PLAIN.placement, saved_bytes=8),
    times={SPILL: (0.5, 0.5), FETCH: (0.25, 0.25)},
    kept_bytes={FILE: (1.0, 1.0)},
)


def moved(schedule: Schedule, rank: int, text: str, to: int) -> Schedule:
    row = [entry for entry in schedule.rows[rank] if str(entry) != text]
    row.insert(to, Action.parse(text))
    return replace(schedule, rows=(*schedule.rows[:rank], tuple(row), *schedule.rows[rank + 1 :]))


def without(schedule: Schedule, text: str) -> Schedule:
    rows = tuple(tuple(entry for entry in row if str(entry) != text) for row in schedule.rows)
    return replace(schedule, rows=rows)


def verified() -> None:
    assert verify(SCHEDULE) == verify(PLAIN) == verify(SCHEDULE.with_reductions()) == []
    late = verify(moved(SCHEDULE, 0, "0G1", len(SCHEDULE.rows[0]) - 1))
    assert [str(violation) for violation in late if "deadlock" in str(violation)], late
    assert verify(moved(SCHEDULE, 0, "0D0", 0))
    (lost,) = verify(without(SCHEDULE, "0G1"))
    assert lost.problem == "0G1 is missing: stage 0 runs 0F1, 0B1 and 0D1 for microbatch 1"
    (plain,) = verify(without(PLAIN, "0B1"))  # new kinds change no message about others
    assert plain.problem == "0B1 is missing: stage 0 runs 0F1 for microbatch 1"
    elsewhere = moved(without(SCHEDULE, "0D0"), 1, "0D0", 0)
    assert "0D0 is on rank 1" in verify(elsewhere)[0].problem


def simulated() -> None:
    timeline, plain = simulate(SCHEDULE, COST), simulate(PLAIN, COST)
    spans = {str(span.action): span for span in timeline}
    assert timeline.streams == (Stream.COMPUTE, DISK)
    assert [str(span.action) for span in timeline.on(DISK)[1]] == [
        *(f"1{kind}{microbatch}" for kind in (SPILL, FETCH) for microbatch in range(4))
    ]
    for span in (span for row in timeline.on(DISK) for span in row):
        assert span.end - span.start == (0.5 if span.action.kind is SPILL else 0.25)
    assert spans["0D2"].start == spans["0F2"].end == spans["0F3"].start  # beside what follows
    for microbatch in range(4):
        assert spans[f"0B{microbatch}"].start >= spans[f"0G{microbatch}"].end  # which waits for what it needs
    assert timeline.makespan > plain.makespan
    waited = [str(cause) for cause in chain.from_iterable(causes(timeline)) if str(cause.span.action) == "1B3"]
    assert waited == ["1B3 on rank 1 waited for the saved of stage 1, microbatch 3 from rank 1"]
    path = critical_path(timeline)
    assert path[0].span.start == 0
    assert path[-1].span.end == timeline.makespan
    graph = dependency_graph(SCHEDULE)
    reasons = {str(before): data["reason"] for before, after, data in graph.edges(data=True) if str(after) == "0B1"}
    assert reasons["0G1"] == "saved of stage 0, microbatch 1"
    assert reasons.get("0F1") is None
    assert measured_costs(timeline).times == COST.times


def counted() -> None:
    timeline, plain = simulate(SCHEDULE, COST), simulate(PLAIN, COST)
    assert plain.peak_activations == (4, 4)
    assert timeline.peak_activations == (2, 2)  # one is computed while the one before it is copied
    assert plain.peak_bytes == (32, 32)
    assert timeline.peak_bytes == (2 * 8 + 3, 2 * 8 + 3)  # and three are on the disk, or on their way there
    assert timeline.memory(0)[-1][1] == 0
    assert [str(violation) for violation in verify(SCHEDULE, memory_cap=1)] == []
    assert verify(PLAIN, memory_cap=3)


def drawn() -> None:
    timeline = simulate(SCHEDULE, COST)
    for options in ({}, {"color_system": "truecolor", "force_terminal": True}):
        shown = StringIO()
        console = Console(file=shown, width=150, **options)  # type: ignore[arg-type]
        console.print(Gantt(timeline))
        console.print(CriticalPath(timeline))
        assert "spill" in shown.getvalue()
        assert "disk" in shown.getvalue()
    for text in (svg(timeline), html(timeline), perfetto(timeline)):
        assert "0D0" in text
        assert "0G3" in text
        assert "spill" in text
    named = [event["args"].get("name") for event in json.loads(perfetto(timeline))["traceEvents"] if event["ph"] == "M"]
    assert "rank 1 disk" in named


def written() -> None:
    assert "0F0,0D0,0F1,0D1" in SCHEDULE.to_csv()
    assert Schedule.from_csv(SCHEDULE.to_csv(), name="gpipe") == SCHEDULE
    timeline = simulate(SCHEDULE, COST)
    assert Timeline.from_json(timeline.to_json()) == timeline
    assert executed_schedule(timeline) == SCHEDULE
    with TemporaryDirectory() as folder:
        kept, csv = Path(folder) / "timeline.json", Path(folder) / "schedule.csv"
        kept.write_text(timeline.to_json(), encoding="utf-8")
        csv.write_text(SCHEDULE.to_csv(), encoding="utf-8")
        for file in (kept, csv):
            assert main(["verify", str(file)]) == main(["simulate", str(file)]) == main(["draw", str(file)]) == 0


def priced() -> None:
    prices = {"spill": 0.5, "fetch": 0.25, "saved_bytes": 8, "on_the_disk_bytes": 1}
    timeline = simulate(SCHEDULE, COST)
    assert simulate(SCHEDULE, even_costs(PLAIN.placement, prices)) == timeline
    with TemporaryDirectory() as folder:
        csv = Path(folder) / "schedule.csv"
        csv.write_text(SCHEDULE.to_csv(), encoding="utf-8")
        options = [word for name, price in prices.items() for word in (f"--{name.replace('_', '-')}", str(price))]
        with redirect_stdout(StringIO()) as shown:
            assert main(["simulate", str(csv), *options, "--json"]) == 0
    measures = json.loads(shown.getvalue())
    assert (measures["makespan"], measures["peak_bytes"]) == (timeline.makespan, [*timeline.peak_bytes])
    state = State.of({"schedule": "gpipe", "ranks": "2", **{name: str(price) for name, price in prices.items()}})
    assert state.prices.cost_model(PLAIN.placement) == COST
    said: dict[str, Any] = {}
    exec(python(state, "gpipe"), said)
    assert said["cost"] == COST


def searched() -> None:
    found = search(PLAIN.placement, 4, COST, candidates=40, start=[SCHEDULE])
    assert verify(found.schedule) == []
    assert found.timeline.span <= simulate(PLAIN, COST).span
    again = search(PLAIN.placement, 4, COST, candidates=40, start=[PLAIN])
    assert again.schedule == found.schedule  # it leaves them out
    assert simulate(spilled(found.schedule), COST).span >= found.timeline.span


def lowered() -> None:
    programs = lower(SCHEDULE, COST)
    assert verify_programs(programs) == []
    texts = [str(getattr(step, "entry", "")) for step in programs[0].instructions]
    assert texts.index("0D0") > texts.index("0F0")
    lost = replace(
        programs[0],
        instructions=tuple(step for step in programs[0].instructions if str(getattr(step, "entry", "")) != "0G1"),
    )
    assert any("0B1 needs the saved" in violation.problem for violation in verify_programs([lost, programs[1]]))


def ran() -> None:
    import torch

    from pipeflow import Pipeline, execute_pipeline
    from pipeflow.engine.parallel.context import current_context
    from pipeflow.testing import run_threads
    from pipeflow.testing.models import PlainModel

    model = PlainModel()
    batch = model.batch(9, seed=1)

    def step(schedule: Schedule) -> tuple[dict[str, torch.Tensor], Timeline | None]:
        chunks = model.chunks(schedule, current_context().pipeline_rank)
        pipeline = Pipeline(chunks, schedule, criterion=model.criterion)
        for _ in range(2):  # the operations are used again
            pipeline.zero_grad()
            output = execute_pipeline(iter([batch]), pipeline)
        pipeline.zero_grad()
        output = execute_pipeline(iter([batch]), pipeline, trace=True)
        named = {name.split(".", 2)[2]: value.grad for name, value in pipeline.named_parameters()}
        assert execute_pipeline(iter([batch]), pipeline, forward_only=True).timeline is None
        return {name: gradient for name, gradient in named.items() if gradient is not None}, output.timeline

    _, wanted = model.plain_step(batch)
    for plain in (PLAIN, make_schedule("1f1b", ranks=2, microbatches=4)):
        schedule = spilled(plain)
        results = run_threads(step, 2, schedule)
        gradients = {name: gradient for mine, _ in results for name, gradient in mine.items()}
        assert gradients.keys() == wanted.keys()
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, wanted[name], rtol=1e-12, atol=1e-14)
        timeline = results[0][1]
        assert timeline is not None
        assert [len(row) for row in timeline.on(DISK)] == [8, 8]
        assert all(sum(span.end - span.start for span in row) > 4e-3 for row in timeline.on(DISK))
        assert timeline.peak_activations[0] <= simulate(plain).peak_activations[0]


if __name__ == "__main__":
    globals()[sys.argv[1]]()
