"""Recordings without names: one that can be read in several ways is told as what it is, or not at all."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from pipeflow.core.action import Action, Kind
from pipeflow.core.errors import UsageError
from pipeflow.core.placement import Placement
from pipeflow.core.schedule import Schedule
from pipeflow.schedules import SCHEDULES, make_schedule
from pipeflow.tools.traces import readings
from pipeflow.tools.traces.action_names import Named, RecordedAction
from pipeflow.tools.traces.explanation import Explanation
from pipeflow.tools.traces.steps import Step
from tests.traces.recording import Machine, explain, ran, record

Events = list[dict[str, Any]]
BACKWARD = "autograd::engine"


def rewrite(folder: Path, change: Callable[[int, Events], Events]) -> Path:
    """Changes the events of each rank's trace."""
    for path in sorted(folder.iterdir()):
        whole = json.loads(path.read_text(encoding="utf-8"))
        whole["traceEvents"] = change(whole["distributedInfo"]["rank"], whole["traceEvents"])
        path.write_text(json.dumps(whole), encoding="utf-8")
    return folder


def recorded(folder: Path, schedule: Schedule, *, steps: int = 2, **options: Any) -> Path:
    timelines = [ran(schedule, Machine(seed=seed)) for seed in range(steps)]
    return record(folder, *timelines, name=None, **options)


def rows_of(found: Explanation) -> tuple[str, ...]:
    return tuple(found.schedule.to_csv().splitlines())


def test_forwards_that_a_backward_computes_again_are_none(tmp_path: Path) -> None:
    schedule = make_schedule("1f1b", ranks=4, microbatches=8)

    def again(_: int, events: Events) -> Events:
        """Each node of a backward runs an operator whose result has a number of its own, and a backward in it."""
        added = []
        for each in (each for each in events if each["name"].startswith(BACKWARD)):
            inside = {"ts": each["ts"] + 0.1 * each["dur"], "dur": 0.2 * each["dur"]}
            later = {"ts": each["ts"] + 0.5 * each["dur"], "dur": 0.2 * each["dur"]}
            number = {"Sequence number": 10_000 + each["args"]["Sequence number"]}
            added.append(each | inside | {"name": "aten::mm", "args": number | {"Fwd thread id": 0}})
            added.append(each | later | {"args": number | {"Fwd thread id": 1}})
        return events + added

    found = explain([rewrite(recorded(tmp_path / "traces", schedule), again)])
    assert rows_of(found) == tuple(schedule.to_csv().splitlines())


NEED_NAMES = {"v-half", "v-min", "chimera", "hanayo", "dualpipe", "zb-auto", "naive", "seq1f1b"}
"""Schedules of which operators and messages do not show which stage and microbatch an action is of."""


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_is_told_without_names_as_it_ran_or_not_at_all(name: str, tmp_path: Path) -> None:
    schedule = make_schedule(name, ranks=4, microbatches=8).without_pairs()
    folder = recorded(tmp_path / "traces", schedule)
    if name == "naive":  # nothing says where its steps end
        found = explain([folder])
        assert found.schedule.num_microbatches == 1
        assert found.notes[0].startswith("nothing marks steps, so each microbatch is taken for one")
        return
    try:
        told = rows_of(explain([folder]))
    except UsageError:
        assert name in NEED_NAMES
    else:
        assert told == tuple(schedule.to_csv().splitlines())


def test_a_first_stage_may_leave_a_whole_backward_to_its_second_half(tmp_path: Path) -> None:
    schedule = make_schedule("zb-v", ranks=2, microbatches=8)
    timeline = ran(schedule, Machine(seed=0))
    first = {1e8 + 1e6 * span.start for span in timeline if (span.action.kind, span.action.stage) == (Kind.I, 0)}

    def without_first_halves(_: int, events: Events) -> Events:
        return [each for each in events if not (is_backward(each) and is_in(each, first))]

    def is_in(event: dict[str, Any], starts: set[float]) -> bool:
        return any(start - 1 < event["ts"] < start + 450 for start in starts)

    folder = record(tmp_path / "traces", timeline, name=None)
    found = explain([rewrite(folder, lambda rank, events: without_first_halves(rank, events) if rank == 0 else events)])
    assert rows_of(found) == tuple(schedule.to_csv().splitlines())


def is_backward(event: dict[str, Any]) -> bool:
    return str(event["name"]).startswith(BACKWARD)


def test_what_is_done_before_a_wait_is_no_part_of_a_forward(tmp_path: Path) -> None:
    schedule = make_schedule("1f1b", ranks=2, microbatches=4)
    timeline = ran(schedule)

    def adds(rank: int, events: Events) -> Events:
        """Before it waits, rank 1 adds to gradients. What makes no node has the number of the next that does."""
        mine = [each for each in events if each["name"] == "aten::mm" and rank]
        starts = sorted(each["ts"] for each in mine)[::2]
        early = [each | {"ts": each["ts"] - 20, "dur": 1} for each in mine if each["ts"] in starts]
        return events + early

    found = explain([rewrite(record(tmp_path / "traces", timeline, name=None), adds)])
    assert [span.start for span in found.timeline.rows[1]] == pytest.approx(
        [span.start for span in timeline.rows[1]], abs=1e-6
    )


def test_backwards_may_come_last_first(tmp_path: Path) -> None:
    rows = [
        [f"{stage}F{each}" for each in range(6)] + [f"{stage}B{each}" for each in range(5, -1, -1)]
        for stage in range(3)
    ]
    schedule = Schedule.from_csv("\n".join(map(",".join, rows)))
    found = explain([recorded(tmp_path / "traces", schedule)])
    assert rows_of(found) == tuple(schedule.to_csv().splitlines())
    assert found.schedule.placement.num_stages == 3


@pytest.mark.parametrize("order", [(3, 2, 1, 0), (2, 0, 3, 1)])
def test_stages_may_be_in_another_order_than_ranks(order: tuple[int, ...], tmp_path: Path) -> None:
    schedule = make_schedule("1f1b", ranks=4, microbatches=8)
    folder = recorded(tmp_path / "traces", schedule)
    texts = [json.loads((folder / f"rank{rank}.json").read_text(encoding="utf-8")) for rank in range(4)]
    for place, rank in enumerate(order):
        texts[place]["distributedInfo"]["rank"] = rank
        (folder / f"rank{rank}.json").write_text(json.dumps(texts[place]), encoding="utf-8")
    found = explain([folder])
    assert found.schedule.placement.paths == (order,)
    assert found.names[0] == "1f1b"
    assert found.notes == ()


def test_of_several_pipelines_one_is_shown(tmp_path: Path) -> None:
    schedule = make_schedule("1f1b", ranks=2, microbatches=8)
    found = explain([recorded(tmp_path / "traces", schedule, replicas=2)])
    assert rows_of(found) == tuple(schedule.to_csv().splitlines())
    assert found.notes == ("ranks 0, 2 are shown; 2 others do the same in other pipelines",)


def test_a_first_step_in_which_some_ranks_do_more_is_left_out(tmp_path: Path) -> None:
    schedule = make_schedule("1f1b", ranks=4, microbatches=4)
    steps = [ran(schedule, Machine(seed=seed)) for seed in range(3)]
    folder = record(tmp_path / "traces", *steps, name=None)

    def first_tries(rank: int, events: Events) -> Events:
        """Ranks but the first run a forward and a backward more; each step ends with that of an optimizer."""
        zero, added = 1e8, []
        for step in steps:
            zero += 1.4e6 * step.makespan
            added.append({"ph": "X", "cat": "user_annotation", "name": "Optimizer.step#SGD.step", "ts": zero, "dur": 1})
            zero += 0.1e6 * step.makespan
        for place, name in enumerate(("aten::mm", f"{BACKWARD}::evaluate_function: MmBackward0")) if rank else ():
            number, start = {"Sequence number": 5, "Fwd thread id": place}, 1e8 - 3000 + 1000 * place
            added.append({"ph": "X", "cat": "cpu_op", "name": name, "args": number, "ts": start, "dur": 900})
        return events + added

    found = explain([rewrite(folder, first_tries)])
    assert rows_of(found) == tuple(schedule.to_csv().splitlines())
    assert [*found.step_seconds] == pytest.approx([each.makespan for each in steps[1:]], abs=1e-5)
    assert found.notes == ("steps are left out in which a rank has other actions or another order: 1",)


@pytest.mark.parametrize("named", [True, False])
def test_time_before_the_first_action_of_a_step_stands_out(named: bool, tmp_path: Path) -> None:
    schedule = make_schedule("1f1b", ranks=2, microbatches=4)
    folder = record(tmp_path / "traces", ran(schedule), marks=True)

    def waits_for_data(_: int, events: Events) -> Events:
        mark = next(each for each in events if each["name"].startswith("ProfilerStep"))
        first = mark["ts"]
        mark["ts"], mark["dur"] = first - 40_000, mark["dur"] + 40_000
        name = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
        return [*events, *([mark | {"name": name, "ts": first - 38_000, "dur": 30_000}] if named else [])]

    found = explain([rewrite(folder, waits_for_data)])
    before, after = found.outside
    assert (before.rank, before.is_before) == (0, True)
    assert before.seconds == pytest.approx(0.04, abs=1e-6)
    assert not after.is_before
    assert after.seconds == pytest.approx(0.4 * found.timeline.makespan, rel=1e-3)
    assert (found.findings[0].kind, found.findings[0].where) == ("outside", 0)
    said = "of it, enumerate(DataLoader) takes 75%" if named else "nothing names what runs then"
    assert said in found.findings[0].text


def without_sends(rank: int, events: Events) -> Events:
    return [each for each in events if rank != 1 or each["name"] != "c10d::send"]


def sums_alone(_: int, events: Events) -> Events:
    """What a job without a pipeline does: ranks sum their gradients."""
    kept = [each for each in events if not each["name"].startswith("c10d::")]
    return [*kept, kept[-1] | {"cat": "cpu_op", "name": "c10d::allreduce_", "args": {}}]


def earlier(rank: int, events: Events) -> Events:
    """Rank 1 runs all of its actions before what they need is made, on the same machine."""
    return [each | {"ts": each["ts"] - 3_000 * (rank == 1)} for each in events]


def pausing(_: int, events: Events) -> Events:
    """All ranks stand still for 20 ms before their fourth action."""
    operators = sorted(each["ts"] for each in events if each["name"].startswith(("aten", "autograd")))
    return [each | {"ts": each["ts"] + 2e4 * (each["ts"] >= operators[6])} for each in events]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (pausing, r"as 3 stages on ranks 0, 1, 2: its replay differs from it by .\d+%"),
        (earlier, "rank 1 would use a value before rank 0 makes it, by the clock of one machine"),
        (
            without_sends,
            r"fits no pipeline \(as 3 stages on ranks 0, 1, 2: rank 1 sent 0 times and received 16 times.*--names",
        ),
    ],
)
def test_what_contradicts_itself_is_not_told(
    change: Callable[[int, Events], Events], said: str, tmp_path: Path
) -> None:
    folder = recorded(tmp_path / "traces", make_schedule("1f1b", ranks=3, microbatches=8), steps=1)
    with pytest.raises(UsageError, match=said):
        explain([rewrite(folder, change)])


def test_a_step_that_its_replay_contradicts_gets_no_other_orders(tmp_path: Path) -> None:
    """Names say what ran. A rank stands still for long once, which costs of actions do not say."""
    schedule = make_schedule("1f1b", ranks=2, microbatches=4)
    folder = record(tmp_path / "traces", ran(schedule))
    late = sorted(each["ts"] for each in json.loads((folder / "rank0.json").read_text(encoding="utf-8"))["traceEvents"])

    def pause(_: int, events: Events) -> Events:
        return [each | {"ts": each["ts"] + 5e4 * (each["ts"] > late[len(late) // 2])} for each in events]

    found = explain([rewrite(folder, pause)])
    assert found.names[0] == "1f1b"
    assert found.replay is not None
    assert found.replanned is None
    assert found.gains == ()


def test_a_backward_inside_of_a_node_is_none_of_its_own(tmp_path: Path) -> None:
    """Reentrant checkpoints run the backward of what they compute again inside of a node. Its numbers are those that
    operators before the next forward have, which make nothing themselves.
    """
    schedule = make_schedule("1f1b", ranks=2, microbatches=4)

    def reentrant(_: int, events: Events) -> Events:
        added = []
        forwards = [each for each in events if each["name"] == "aten::mm"]
        nodes = {each["args"]["Sequence number"]: each for each in events if each["name"].startswith(BACKWARD)}
        for before, each in pairwise(forwards[1::2]):
            number = {"Sequence number": each["args"]["Sequence number"] + 5}
            added.append(each | {"name": "aten::detach", "args": number | {"Fwd thread id": 0}})
            node = nodes[before["args"]["Sequence number"]]
            inside = {"ts": node["ts"] + 0.5 * node["dur"], "dur": 0.2 * node["dur"]}
            added.append(node | inside | {"args": number | {"Fwd thread id": 1}})
        return events + added

    found = explain([rewrite(recorded(tmp_path / "traces", schedule), reentrant)])
    assert rows_of(found) == tuple(schedule.to_csv().splitlines())


@pytest.mark.parametrize("first", [0, 1])
def test_tensor_ranks_in_a_grid_are_told_by_their_numbers(first: int, tmp_path: Path) -> None:
    """Ranks 0 and 1 run stage 0 at the same time, and 2 and 3 stage 1, of which one has its forwards a little later."""
    schedule = make_schedule("1f1b", ranks=2, microbatches=4)
    folder = recorded(tmp_path / "traces", schedule, replicas=2)

    def later(rank: int, events: Events) -> Events:
        is_late = rank == 2 + first
        return [each | {"ts": each["ts"] + 20 * (is_late and each["name"] == "aten::mm")} for each in events]

    found = explain([rewrite(folder, later)])
    assert rows_of(found) == tuple(schedule.to_csv().splitlines())
    assert found.notes == ("ranks 0, 2 are shown; 2 others do the same in other pipelines",)


def test_a_noisy_step_is_left_out_if_others_replay(tmp_path: Path) -> None:
    """The second of three steps is the median one. An action of it stands still for long."""
    schedule = make_schedule("1f1b", ranks=2, microbatches=4)
    timelines = [ran(schedule, Machine(slow=dict.fromkeys(range(2), factor))) for factor in (1.0, 1.01, 2.0)]

    def noisy(_: int, events: Events) -> Events:
        _, second, third = (each["ts"] for each in events if each["name"].startswith("ProfilerStep"))
        return [each | {"ts": each["ts"] + 4e3 * (second + 5e3 < each["ts"] < third)} for each in events]

    found = explain([rewrite(record(tmp_path / "traces", *timelines, name=None, marks=True), noisy)])
    assert [*found.step_seconds] == pytest.approx([timelines[0].makespan, timelines[2].makespan], rel=1e-3)
    assert found.notes == ("steps are left out that take much more or less time than their replay: 1",)


@pytest.mark.parametrize("ranks", [2, 4])
def test_backwards_of_a_named_schedule_may_have_another_order(ranks: int, tmp_path: Path) -> None:
    """torch runs looped BFS with the backwards of each stage last first."""
    named = make_schedule("looped-bfs", ranks=ranks, microbatches=6)
    rows = []
    for rank in range(ranks):
        forwards = [action for action in named.actions(rank) if action.kind is Kind.F]
        rows.append((*forwards, *(replace(action, kind=Kind.B) for action in reversed(forwards))))
    schedule = replace(named, rows=tuple(rows))
    found = explain([recorded(tmp_path / "traces", schedule)])
    assert rows_of(found) == tuple(schedule.to_csv().splitlines())
    assert found.schedule.placement == schedule.placement
    assert found.nearest is not None
    assert found.nearest.name == "looped-bfs"


def test_values_are_sent_after_they_are_made_and_received_before_their_use() -> None:
    """Of rank 0 with stages 0 and 2 of 4: 0F0 sends, 2F0 receives and sends."""
    actions = [Action(Kind.F, 0, 0), Action(Kind.F, 2, 0)]
    part = [
        RecordedAction(each.kind, Named(each.kind, each.stage, each.microbatch), 2.0 * place, 2.0 * place + 1)
        for place, each in enumerate(actions)
    ]
    placement = Placement.looped(2, 2)

    def in_time(sends: list[float], receives: list[float], *, is_after: bool = True) -> bool:
        return readings._in_time(readings._Messages(0, sends, receives, is_after), part, placement)

    assert in_time([1.0, 3.0], [1.5])
    assert not in_time([1.0, 3.0], [2.5])
    assert not in_time([0.5, 3.0], [1.5])
    assert in_time([0.5, 2.5], [1.5], is_after=False)
    assert in_time([1.0, 1.1, 3.0], [1.5])  # nothing says how many tensors pass with each action


def test_steps_in_another_order_than_most_are_left_out(tmp_path: Path) -> None:
    orders = [make_schedule(name, ranks=2, microbatches=4) for name in ("gpipe", "1f1b", "gpipe")]
    timelines = [ran(order, Machine(seed=seed)) for seed, order in enumerate(orders)]
    found = explain([record(tmp_path / "traces", *timelines, marks=True)])
    assert rows_of(found) == tuple(orders[0].to_csv().splitlines())
    assert found.notes == ("steps are left out in which a rank has other actions or another order: 1",)


def test_a_long_pause_is_told_where_the_replay_contradicts(tmp_path: Path) -> None:
    """With names, the step is told, and no other order."""
    schedule = make_schedule("1f1b", ranks=3, microbatches=8)
    said = (
        r"its replay differs from it by .\d+%, and rank . stood still for 20 ms before .F. although nothing was missing"
    )
    with pytest.raises(UsageError, match=said):
        explain([rewrite(recorded(tmp_path / "traces", schedule, steps=1), pausing)])
    found = explain([rewrite(record(tmp_path / "named", ran(schedule)), pausing)])
    assert (found.replanned, found.gains, found.recut) == (None, (), ())
    [note] = found.notes
    assert re.fullmatch(f"no other order is shown for this step: {said}", note)


def test_what_the_host_does_in_its_pauses_is_told(tmp_path: Path) -> None:
    schedule = make_schedule("1f1b", ranks=2, microbatches=8)

    def stalled(name: str, category: str = "user_annotation") -> Callable[[int, Events], Events]:
        def change(rank: int, events: Events) -> Events:
            if rank != 1:
                return events
            at = sorted(each["ts"] for each in events if each["name"].startswith("PP"))[-1] - 1e-3
            later = [each | {"ts": each["ts"] + 5e3 * (each["ts"] >= at)} for each in events]
            done = {
                "ph": "X",
                "cat": category,
                "name": name,
                "pid": 1,
                "tid": 1,
                "ts": at + 200,
                "dur": 4700,
                "args": {},
            }
            return [*later, *([done] if name else [])]

        return change

    for number, (name, category, said) in enumerate(
        [
            ("save checkpoint", "user_annotation", "save checkpoint takes 9"),
            ("aten::linalg_svd", "cpu_op", "aten::linalg_svd takes 9"),
            ("", "", "no operator runs then, and nothing names what the host does, such as garbage collection"),
        ]
    ):
        folder = rewrite(record(tmp_path / str(number), ran(schedule)), stalled(name, category))
        [found, *_] = explain([folder]).findings
        assert (found.kind, found.where) == ("host stall", 1)
        assert said in found.text


def test_hundreds_of_replicas_are_told_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Readings that begin against the clock of one machine are not compared with named schedules."""
    tried, fitting = list[int](), readings._fitting

    def counted(step: Step, *, messages: bool) -> Iterator[Schedule | None]:
        tried.append(len(step))
        return fitting(step, messages=messages)

    monkeypatch.setattr(readings, "_fitting", counted)
    schedule = make_schedule("1f1b", ranks=2, microbatches=4)
    found = explain([recorded(tmp_path / "traces", schedule, replicas=16)])
    assert rows_of(found) == tuple(schedule.to_csv().splitlines())
    assert {*tried} == {2}
