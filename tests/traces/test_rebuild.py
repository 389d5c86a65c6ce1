"""What traces do not say, or say wrongly: it follows from the rest, or is told."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from pipeflow.core.action import Action, Kind
from pipeflow.core.errors import UsageError
from pipeflow.schedules import make_schedule
from tests.traces.recording import Machine, explain, of_torch, ran, record
from tests.traces.test_explain import of_megatron, rows_of

ORDERS = [
    ("1f1b", 4, 8, {}),
    ("gpipe", 2, 4, {}),
    ("interleaved-1f1b", 4, 8, {}),
    ("interleaved-1f1b", 2, 6, {"chunks": 3}),
]


def with_microbatch(action: Action, _: str) -> str:
    return f"{'forward' if action.kind is Kind.F else 'backward'} of microbatch {action.microbatch}"


@pytest.mark.parametrize(("name", "ranks", "microbatches", "options"), ORDERS)
@pytest.mark.parametrize("operators", [True, False])
def test_stages_that_no_annotation_says_follow_from_the_order(
    name: str, ranks: int, microbatches: int, options: dict[str, int], operators: bool, tmp_path: Path
) -> None:
    schedule = make_schedule(name, ranks=ranks, microbatches=microbatches, **options)
    steps = [ran(schedule, Machine(seed=seed)) for seed in range(2)]
    folder = record(tmp_path / "traces", *steps, name=of_megatron, operators=operators)
    found = explain([folder])
    assert found.schedule.placement == schedule.placement
    if name != "gpipe" or operators:  # without operators, nothing says in which order gpipe runs its backwards
        assert rows_of(found.schedule) == rows_of(schedule)
    assert len(found.step_seconds) == 2


@pytest.mark.parametrize("name", ["interleaved-1f1b", "looped-bfs", "gpipe"])
def test_operators_alone_show_several_stages_of_a_rank(name: str, tmp_path: Path) -> None:
    schedule = make_schedule(name, ranks=2, microbatches=4)
    found = explain([record(tmp_path / "traces", ran(schedule), ran(schedule), name=None)])
    assert rows_of(found.schedule) == rows_of(schedule)
    assert found.schedule.placement == schedule.placement


def test_microbatches_of_stages_that_are_not_said(tmp_path: Path) -> None:
    schedule = make_schedule("interleaved-1f1b", ranks=2, microbatches=4)
    folder = record(tmp_path / "traces", ran(schedule), ran(schedule), name=with_microbatch)
    pattern = r"(?P<kind>\w+) of microbatch (?P<microbatch>\d+)"
    assert rows_of(explain([folder], names=pattern).schedule) == rows_of(schedule)


@pytest.mark.parametrize(
    "pattern",
    [
        r"(?P<stage>\d+):(?P<microbatch>\d+)",
        r"(?P<microbatch>\d+)$",
        r"^(?P<stage>\d+)",
    ],
)
def test_each_group_of_a_pattern_is_optional(pattern: str, tmp_path: Path) -> None:
    schedule = make_schedule("1f1b", ranks=2, microbatches=4)
    steps = [ran(schedule)] * 2
    folder = record(tmp_path / "traces", *steps, name=lambda action, _: f"{action.stage}:{action.microbatch}")
    assert rows_of(explain([folder], names=pattern).schedule) == rows_of(schedule)
    record(tmp_path / "bare", *steps, name=lambda action, _: f"{action.stage}:{action.microbatch}", operators=False)
    with pytest.raises(UsageError, match="does not say whether it is a forward or a backward, and no operator shows"):
        explain([tmp_path / "bare"], names=pattern)


@pytest.mark.parametrize("annotated", [True, False])
def test_a_step_of_which_events_were_lost_is_left_out(annotated: bool, tmp_path: Path) -> None:
    schedule = make_schedule("1f1b", ranks=4, microbatches=4)
    steps = [ran(schedule, Machine(seed=seed)) for seed in range(4)]
    name = of_torch if annotated else None
    folder = record(tmp_path / "traces", *steps, name=name, marks=True, lost={(1, 2, 3), (2, 0, 0)})
    found = explain([folder])
    assert rows_of(found.schedule) == rows_of(schedule)
    assert [*found.step_seconds] == pytest.approx([steps[0].makespan, steps[3].makespan], abs=1e-5)
    assert "steps are left out in which a rank has other actions or another order: 2" in found.notes


def test_of_one_step_whose_events_were_lost_it_is_told_what_is_missing(tmp_path: Path) -> None:
    schedule = make_schedule("1f1b", ranks=4, microbatches=4)
    found = explain([record(tmp_path / "traces", ran(schedule), lost={(0, 2, 3)})])
    missing = next(iter([*schedule.actions(2)][3:]))
    assert any(f"{missing} is missing" in str(each) for each in found.violations)
    assert found.replanned is None


@pytest.mark.parametrize("marks", [True, False])
def test_ranks_that_began_to_record_later_are_explained_by_the_steps_of_all(marks: bool, tmp_path: Path) -> None:
    schedule = make_schedule("1f1b", ranks=2, microbatches=4)
    steps = [ran(schedule, Machine(seed=seed, slow={1: 1 + seed})) for seed in range(3)]
    folder = record(tmp_path / "traces", *steps, marks=marks)
    events = json.loads((folder / "rank1.json").read_text(encoding="utf-8"))
    late = 1e6 * (100 + 1.5 * steps[0].makespan) - 1
    events["traceEvents"] = [each for each in events["traceEvents"] if each["ts"] > late]
    (folder / "rank1.json").write_text(json.dumps(events), encoding="utf-8")
    found = explain([folder])
    assert [*found.step_seconds] == pytest.approx([each.makespan for each in steps[1:]], abs=1e-5)
    assert found.notes == ()


def test_messages_that_cross_change_nothing(tmp_path: Path) -> None:
    schedule = make_schedule("1f1b", ranks=4, microbatches=8)
    folder = record(tmp_path / "traces", ran(schedule), ran(schedule))
    for path in folder.iterdir():
        whole = json.loads(path.read_text(encoding="utf-8"))
        calls = [each for each in whole["traceEvents"] if each["name"].startswith("c10d::")]
        for one, other in zip(calls[::2], calls[1::2], strict=False):
            one["ts"], other["ts"] = other["ts"], one["ts"]
        path.write_text(json.dumps(whole), encoding="utf-8")
    assert rows_of(explain([folder]).schedule) == rows_of(schedule)


def test_kernels_count_where_they_ran_and_not_where_they_were_launched(tmp_path: Path) -> None:
    schedule = make_schedule("1f1b", ranks=2, microbatches=4)
    timeline = ran(schedule, Machine(seed=3))
    folder = record(tmp_path / "traces", timeline, operators=False)
    for rank, path in enumerate(sorted(folder.iterdir())):
        whole = json.loads(path.read_text(encoding="utf-8"))
        events, added = whole["traceEvents"], []
        named = [each for each in events if each["name"].startswith("PP:")]
        for number, (each, span) in enumerate(zip(named, timeline.rows[rank], strict=True)):
            each["ts"], each["dur"] = 1e8 + 20.0 * number, 19.0  # the host is far ahead of the device
            calls = [("kernel", "gemm", span.start, span.end), ("kernel", "ncclDevKernel_SendRecv", span.end, 1.0)]
            for part, (category, name, start, end) in enumerate(calls):
                own = {"args": {"correlation": 2 * number + part}, "ph": "X"}
                launch = {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": each["ts"] + 5 + part, "dur": 1}
                times = {"ts": 1e8 + 1e6 * start, "dur": 1e6 * (end - start)}
                added += [launch | own, {"cat": category, "name": name} | times | own]
        whole["traceEvents"] = [*named, *added]
        path.write_text(json.dumps(whole), encoding="utf-8")
    found = explain([folder])
    assert rows_of(found.schedule) == rows_of(schedule)
    for mine, its in zip(found.timeline, timeline, strict=True):
        assert (mine.start, mine.end) == pytest.approx((its.start, its.end), abs=1e-6)


def test_sums_and_gathers_of_torchs_runtime_are_no_actions(tmp_path: Path) -> None:
    schedule = make_schedule("1f1b", ranks=2, microbatches=3)
    folder = record(tmp_path / "traces", ran(schedule))
    for path in folder.iterdir():
        whole = json.loads(path.read_text(encoding="utf-8"))
        first = whole["traceEvents"][0]
        names = ("PP:0UNSHARD", "PP:0RESHARD", "PP:0REDUCE_GRAD", "PP:0SEND_F0", "PP:1RECV_B2", "PP:1WAIT_SEND_B2")
        whole["traceEvents"] += [first | {"name": name} for name in names]
        path.write_text(json.dumps(whole), encoding="utf-8")
    assert rows_of(explain([folder]).schedule) == rows_of(schedule)


def test_backwards_that_are_not_counted_follow_from_operators(tmp_path: Path) -> None:
    """Names say kinds alone, and backwards run in another order than forwards."""
    schedule = make_schedule("gpipe", ranks=3, microbatches=4)
    rows = tuple((*row[:4], *reversed(row[4:])) for row in schedule.rows)
    last_first = ran(replace(schedule, rows=rows))
    found = explain([record(tmp_path / "traces", last_first, last_first, name=of_megatron)])
    assert found.schedule.rows == rows


def test_an_action_that_is_named_twice_is_one(tmp_path: Path) -> None:
    schedule = make_schedule("1f1b", ranks=2, microbatches=4)
    folder = record(tmp_path / "traces", ran(schedule), ran(schedule), name=of_megatron)
    for path in folder.iterdir():
        whole = json.loads(path.read_text(encoding="utf-8"))
        twice = {"forward_step": "forward-compute", "backward_step": "backward-compute"}
        whole["traceEvents"] += [
            each | {"name": twice[each["name"]], "dur": 0.99 * each["dur"]}
            for each in whole["traceEvents"]
            if each["name"] in twice
        ]
        path.write_text(json.dumps(whole), encoding="utf-8")
    assert rows_of(explain([folder]).schedule) == rows_of(schedule)


def test_names_of_forwards_alone_do_not_hide_backwards(tmp_path: Path) -> None:
    schedule = make_schedule("1f1b", ranks=2, microbatches=4)

    def of_forwards(action: Action, pair: str) -> str:
        return of_megatron(action, pair) if action.kind is Kind.F else "something"

    folder = record(tmp_path / "traces", ran(schedule), ran(schedule), name=of_forwards)
    assert rows_of(explain([folder]).schedule) == rows_of(schedule)
    with pytest.raises(UsageError, match=r"rank0.json: --names finds no backward, although some ran"):
        explain([folder], names="(?P<kind>forward)_step")


def test_stages_that_each_rank_counts_for_itself_are_refused(tmp_path: Path) -> None:
    schedule = make_schedule("1f1b", ranks=2, microbatches=4)
    folder = record(tmp_path / "traces", ran(schedule), name=lambda action, _: f"{action.kind}0.{action.microbatch}")
    with pytest.raises(UsageError, match="names say the same stages on every rank, but ranks send to each other"):
        explain([folder], names=r"(?P<kind>[FB])(?P<stage>\d)\.(?P<microbatch>\d)")
