"""Traces of steps that are made up action by action: what ran is found again, and what is wrong is named."""

from __future__ import annotations

import gzip
import json
import random
import re
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from pipeflow.core.action import Action, Kind
from pipeflow.core.errors import UsageError
from pipeflow.core.schedule import Schedule
from pipeflow.core.timeline import Timeline
from pipeflow.schedules import SCHEDULES, make_schedule
from tests.traces.recording import Machine, explain, of_torch, ran, record

ONE_STAGE = ["gpipe", "1f1b", "eager-1f1b"]
WORDS = {Kind.F: "fwd", Kind.B: "bwd"}


def bidirectional(name: str) -> bool:
    return len(make_schedule(name, ranks=4, microbatches=4).placement.paths) > 1


def rows_of(schedule: Schedule) -> tuple[str, ...]:
    return tuple(schedule.to_csv().splitlines())


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_schedule_that_ran_is_rebuilt(name: str, tmp_path: Path) -> None:
    schedule = make_schedule(name, ranks=4, microbatches=8).without_pairs()
    timeline = ran(schedule, Machine(seed=1))
    found = explain([record(tmp_path / "traces", timeline)])
    assert rows_of(found.schedule) == rows_of(schedule)
    assert found.schedule.placement == schedule.placement
    assert found.violations == ()
    for mine, its in zip(found.timeline, timeline, strict=True):
        assert (mine.start, mine.end) == pytest.approx((its.start, its.end), abs=1e-6)
    assert found.replanned is not None
    assert found.replanned.now.timeline.makespan == pytest.approx(timeline.makespan, rel=0.03)


@pytest.mark.parametrize(
    ("name", "called"), [("1f1b", "1f1b"), ("zb-v", "zb-v"), ("interleaved-1f1b", "interleaved-1f1b")]
)
def test_the_schedule_has_its_name(name: str, called: str, tmp_path: Path) -> None:
    found = explain([record(tmp_path / "traces", ran(make_schedule(name, ranks=4, microbatches=8)))])
    assert name in found.names
    assert found.nearest is None


def test_an_own_order_has_the_nearest_name_and_a_faster_order(tmp_path: Path) -> None:
    rows = [list(row) for row in make_schedule("1f1b", ranks=2, microbatches=6).rows]
    rows[0][1], rows[0][2] = rows[0][2], rows[0][1]  # a forward fewer before the first backward
    schedule = Schedule.from_csv("\n".join(",".join(map(str, row)) for row in rows))
    found = explain([record(tmp_path / "traces", ran(schedule, Machine(jitter=0)))])
    assert found.names == ()
    assert found.nearest is not None
    assert found.nearest.moved <= 1
    assert found.gains[0].timeline.makespan <= found.timeline.makespan


@pytest.mark.parametrize("name", ONE_STAGE)
def test_operators_alone_show_the_order(name: str, tmp_path: Path) -> None:
    schedule = make_schedule(name, ranks=4, microbatches=8)
    steps = [ran(schedule, Machine(seed=seed)) for seed in range(2)]
    found = explain([record(tmp_path / "traces", *steps, name=None)])
    assert rows_of(found.schedule) == rows_of(schedule)
    assert len(found.step_seconds) == 2


def of_gpipe(action: Action, _: str) -> str:
    return f"{'Forward' if action.kind is Kind.F else 'Backward'} {action.microbatch}"


def of_megatron(action: Action, _: str) -> str:
    return f"{'forward' if action.kind is Kind.F else 'backward'}_step"


def of_deepspeed(action: Action, _: str) -> str:
    return f"{'ForwardPass' if action.kind is Kind.F else 'BackwardPass'}(buffer_id={action.microbatch % 2})"


@pytest.mark.parametrize("annotation", [of_gpipe, of_megatron, of_deepspeed])
def test_annotations_of_engines_are_known(annotation: Callable[[Action, str], str], tmp_path: Path) -> None:
    schedule = make_schedule("1f1b", ranks=4, microbatches=8)
    steps = [ran(schedule, Machine(seed=seed)) for seed in range(2)]
    found = explain([record(tmp_path / "traces", *steps, name=annotation)])
    assert rows_of(found.schedule) == rows_of(schedule)


def test_annotations_of_others_are_read_by_a_pattern(tmp_path: Path) -> None:
    schedule = make_schedule("interleaved-1f1b", ranks=2, microbatches=4)
    folder = record(
        tmp_path / "traces",
        ran(schedule),
        name=lambda action, _: f"my {WORDS[action.kind]} of part {action.stage}, batch {action.microbatch}",
    )
    with pytest.raises(
        UsageError,
        match=r"no forward or backward: name the actions with .*, and give --names, .* its annotations are my fwd of",
    ):
        explain([record(tmp_path / "bare", ran(schedule), name=lambda *_: "my fwd of", operators=False)])
    pattern = r"(?P<kind>fwd|bwd) of part (?P<stage>\d+), batch (?P<microbatch>\d+)"
    assert rows_of(explain([folder], names=pattern).schedule) == rows_of(schedule)
    for wrong, said in (("(", "is not a regular expression"), ("fwd", "has none of the groups")):
        with pytest.raises(UsageError, match=said):
            explain([folder], names=wrong)


def test_the_median_of_several_steps_is_explained(tmp_path: Path) -> None:
    schedule = make_schedule("1f1b", ranks=2, microbatches=4)
    usual, slow = ran(schedule), ran(schedule, Machine(slow={0: 2, 1: 2}))
    found = explain([record(tmp_path / "traces", usual, slow, usual)])
    assert found.timeline.makespan == pytest.approx(usual.makespan, abs=1e-5)
    assert found.outliers == (1,)


def test_clocks_of_machines_are_aligned(tmp_path: Path) -> None:
    timeline = ran(make_schedule("1f1b", ranks=4, microbatches=8))
    found = explain([record(tmp_path / "traces", timeline, clocks={0: 0.0, 1: 3.0, 2: -1.5, 3: 0.02})])
    for mine, its in zip(found.timeline, timeline, strict=True):
        assert mine.start == pytest.approx(its.start, abs=1e-4)
    assert any("clocks" in note for note in found.notes)


def test_what_is_there_of_a_file_that_is_cut_off_is_told(tmp_path: Path) -> None:
    schedule = make_schedule("1f1b", ranks=2, microbatches=4)
    folder = record(tmp_path / "traces", *[ran(schedule)] * 3)
    cut = folder / "rank1.json"
    cut.write_text(cut.read_text(encoding="utf-8")[: int(0.8 * cut.stat().st_size)], encoding="utf-8")
    found = explain([folder])
    assert rows_of(found.schedule) == rows_of(schedule)
    assert len(found.step_seconds) == 2
    assert any("rank1.json is cut off" in note for note in found.notes)


@pytest.mark.parametrize("share", [0.1, 0.3])
def test_of_a_compressed_file_that_is_cut_off_the_last_step_is_left_out(share: float, tmp_path: Path) -> None:
    schedule = make_schedule("1f1b", ranks=2, microbatches=4)
    folder = record(tmp_path / "traces", *[ran(schedule)] * 3, marks=True)
    whole = gzip.compress((folder / "rank1.json").read_bytes())
    (folder / "rank1.json").unlink()
    (folder / "rank1.json.gz").write_bytes(whole[:-4])  # of its checksum
    found = explain([folder])
    assert len(found.step_seconds) == 2
    assert any("rank1.json.gz is cut off: the step in which it ends is not counted" in note for note in found.notes)
    (folder / "rank1.json.gz").write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(UsageError, match=r"rank1.json.gz is cut off(, and no step is whole| before its first event)"):
        explain([folder])


def test_operators_alone_of_a_file_that_is_cut_off(tmp_path: Path) -> None:
    folder = record(tmp_path / "traces", ran(make_schedule("1f1b", ranks=2, microbatches=4)), name=None)
    whole = (folder / "rank1.json").read_text(encoding="utf-8")
    (folder / "rank1.json").write_text(whole[: len(whole) // 2], encoding="utf-8")
    with pytest.raises(UsageError, match=r"rank1.json is cut off, and what was .* fits no .*; record the steps again$"):
        explain([folder])


def test_compressed_traces_are_read(tmp_path: Path) -> None:
    schedule = make_schedule("1f1b", ranks=2, microbatches=4)
    folder = record(tmp_path / "traces", *[ran(schedule)] * 2)
    for path in list(folder.iterdir()):
        whole = gzip.compress(path.read_bytes())
        (folder / f"{path.name}.gz").write_bytes(whole if "0" in path.name else whole[:-200])  # one is cut off
        path.unlink()
    assert rows_of(explain([folder]).schedule) == rows_of(schedule)


def test_ranks_that_files_do_not_say_come_from_their_names(tmp_path: Path) -> None:
    schedule = make_schedule("1f1b", ranks=3, microbatches=4)
    folder = record(tmp_path / "traces", ran(schedule))
    for rank in range(3):
        path = folder / f"rank{rank}.json"
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
        (folder / f"host7_{2 - rank}.pt.trace.json").write_text(
            json.dumps(events), encoding="utf-8"
        )  # sorted the other way round
        path.unlink()
    found = explain([folder])
    assert found.schedule.placement.paths == ((2, 1, 0),)


@pytest.mark.parametrize("groups", [False, True])
def test_one_of_several_replicas_stands_for_all(groups: bool, tmp_path: Path) -> None:
    schedule = make_schedule("1f1b", ranks=4, microbatches=8)
    annotation = of_megatron if groups else of_torch
    found = explain([record(tmp_path / "traces", ran(schedule), name=annotation, replicas=2, groups=groups)])
    assert rows_of(found.schedule) == rows_of(schedule)


def test_files_that_say_no_rank_are_named(tmp_path: Path) -> None:
    folder = record(tmp_path / "traces", ran(make_schedule("1f1b", ranks=2, microbatches=2)))
    events = json.loads((folder / "rank1.json").read_text(encoding="utf-8"))["traceEvents"]
    (folder / "other.json").write_text(json.dumps(events), encoding="utf-8")
    (folder / "rank1.json").unlink()
    with pytest.raises(UsageError, match=r"say a rank: .*other.json; name them like rank0.json"):
        explain([folder])


def test_a_timeline_is_explained_too(tmp_path: Path) -> None:
    path = tmp_path / "measured.json"
    path.write_text(ran(make_schedule("1f1b", ranks=2, microbatches=4)).to_json(), encoding="utf-8")
    assert explain([path]).names[0] == "1f1b"
    with pytest.raises(UsageError, match="give one timeline, or traces of all ranks"):
        explain([path, path])


def test_an_order_that_is_wrong_is_told(tmp_path: Path) -> None:
    timeline = ran(make_schedule("1f1b", ranks=2, microbatches=3))
    rows = (timeline.rows[0], timeline.rows[1][:-1])
    found = explain([record(tmp_path / "traces", replace(timeline, rows=rows))])
    assert "1B2 is missing" in str(found.violations[0])
    assert found.gains == ()
    assert found.cost is None


def broken(folder: Path, case: str) -> list[Path]:
    """Files that show no whole step on all ranks."""
    timeline = ran(make_schedule("1f1b", ranks=4, microbatches=4))
    match case:
        case "one of four":
            return [record(folder, timeline, ranks=range(2, 3))]
        case "twice":
            record(folder, timeline)
            return [folder, folder / "rank0.json"]
        case "no events":
            record(folder, timeline, name=None, operators=False)
        case "not JSON":
            folder.mkdir()
            (folder / "rank0.json").write_text("PK\x03\x04", encoding="utf-8")
        case "no trace":
            folder.mkdir()
            (folder / "rank0.json").write_text('{"nodes": []}', encoding="utf-8")
        case "empty":
            folder.mkdir()
        case "half a step":
            half = Timeline("half", timeline.placement, tuple(row[:1] for row in timeline.rows))
            record(folder, half, name=None)
    return [folder]


@pytest.mark.parametrize(
    ("case", "said"),
    [
        (
            "one of four",
            r"1 of 4 ranks were recorded \(rank 2 runs 8 actions and computes \d+% of .*\), but .*: record a",
        ),
        ("twice", r"rank 0 is in several files \(.*\): give the files of one run"),
        ("no events", "has no annotation and no operator; record a step with torch.profiler on every rank"),
        ("not JSON", "is not JSON: give a trace of torch.profiler, or a timeline of pipeflow"),
        ("no trace", "it has neither traceEvents nor resourceSpans, and is no timeline"),
        ("empty", r"there are no traces in this folder, which end in .json or .json.gz"),
        ("half a step", "shows no forward or backward|no step is there from its first forward"),
    ],
)
def test_what_cannot_be_explained_is_one_sentence(case: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=said):
        explain(broken(tmp_path / "traces", case))


FAULTS = ("slow stage", "slow link", "straggler", "host stall")


def planted(seed: int) -> tuple[Timeline, str, int | tuple[int, int]]:
    """A step with one fault, its kind and its place."""
    chance = random.Random(seed)
    name = ("1f1b", "gpipe", "interleaved-1f1b", "zb-h1", "zb-v")[seed % 5]
    kind, ranks = FAULTS[seed % 4], chance.choice([4, 8])
    schedule = make_schedule(name, ranks=ranks, microbatches=2 * ranks)
    path = schedule.placement.paths[0]
    machine, where = Machine(seed), chance.randrange(ranks)
    match kind:
        case "slow stage":
            where = chance.randrange(len(path))
            machine.slow = {where: chance.uniform(1.3, 2)}
        case "slow link":
            link = chance.choice([link for link in pairwise(path) if link[0] != link[1]])
            link = link if chance.random() < 0.5 else (link[1], link[0])
            machine.links = {link: chance.uniform(0.6, 1.2)}
            return ran(schedule, machine), kind, link
        case "straggler":
            machine.late = {where: chance.uniform(0.2, 0.35)}
        case "host stall":
            machine.stalls = {where: chance.uniform(0.2, 0.4)}
    return ran(schedule, machine), kind, where


@pytest.mark.some(12)
@pytest.mark.parametrize("seed", range(40))
def test_a_planted_fault_is_named_first(seed: int, tmp_path: Path) -> None:
    timeline, kind, where = planted(seed)
    found = explain([record(tmp_path / "traces", timeline)]).findings
    assert found
    assert (found[0].kind, found[0].where) == (kind, where), found


@pytest.mark.parametrize("name", ["interleaved-1f1b", "zb-v"])
def test_a_rank_all_of_whose_stages_are_slow_is_one_finding(name: str, tmp_path: Path) -> None:
    schedule = make_schedule(name, ranks=4, microbatches=8)
    slow = dict.fromkeys(schedule.placement.stages_of(1), 1.5)
    [found] = explain([record(tmp_path / "traces", ran(schedule, Machine(slow=slow)))]).findings
    assert (found.kind, found.where) == ("slow rank", 1)
    assert found.text.endswith("times as long as the median rank, on all of its stages")


NAMED_OR_NOT = pytest.mark.parametrize("name", [of_torch, None], ids=["with names", "without names"])


@NAMED_OR_NOT
def test_a_microbatch_that_is_slow_everywhere_is_one_finding(
    name: Callable[[Action, str], str] | None, tmp_path: Path
) -> None:
    timeline = ran(make_schedule("1f1b", ranks=4, microbatches=8), Machine(microbatches={3: 3.0}))
    explained = explain([record(tmp_path / "traces", timeline, name=name)])
    [found] = explained.findings
    assert (found.kind, found.where) == ("slow microbatch", 3)
    assert found.text.endswith("times as long as others, on 4 ranks")
    assert explained.replay is not None
    assert explained.replay.makespan == pytest.approx(timeline.makespan, rel=0.03)


@NAMED_OR_NOT
def test_a_single_slow_action_is_no_slow_rank(name: Callable[[Action, str], str] | None, tmp_path: Path) -> None:
    schedule = make_schedule("1f1b", ranks=4, microbatches=8)
    timeline = ran(schedule, Machine(actions={"1F5": 6.0, "1B5": 6.0}))
    explained = explain([record(tmp_path / "traces", timeline, name=name)])
    [found] = explained.findings
    assert (found.kind, found.where) == ("slow microbatch", 5)
    assert re.fullmatch(
        r"microbatch 5 takes [56]\.\d+ times as long as others, on stage 1 alone \(rank 1\)", found.text
    )
    assert explained.replay is not None
    assert explained.replay.makespan == pytest.approx(timeline.makespan, rel=0.03)
    [alone] = explain([record(tmp_path / "one", ran(schedule, Machine(actions={"1F5": 9.0})), name=name)]).findings
    assert (alone.kind, alone.where) == ("slow action", 1)
    assert alone.text.startswith("1F5 on rank 1 takes ")


def test_a_slow_link_shows_without_names(tmp_path: Path) -> None:
    timeline = ran(make_schedule("1f1b", ranks=4, microbatches=8), Machine(links={(0, 1): 2.0}))
    explained = explain([record(tmp_path / "traces", timeline, name=None)])
    assert (explained.findings[0].kind, explained.findings[0].where) == ("slow link", (0, 1))
    assert explained.replay is not None
    assert explained.replay.makespan == pytest.approx(timeline.makespan, rel=0.03)


def test_what_all_ranks_lose_is_no_fault_of_one(tmp_path: Path) -> None:
    """Every rank stands still before some actions; rank 2 does so more often."""
    late = Machine(stalls=dict.fromkeys(range(4), 0.15) | {2: 0.5})
    found = explain([record(tmp_path / "traces", ran(make_schedule("1f1b", ranks=4, microbatches=16), late))])
    assert [(each.kind, each.where) for each in found.findings] == [("host stall", 2)]
    even = Machine(stalls=dict.fromkeys(range(4), 1.0))
    found = explain([record(tmp_path / "even", ran(make_schedule("1f1b", ranks=4, microbatches=16), even))])
    assert found.findings == ()


def test_a_link_that_holds_up_a_busy_rank_is_slow(tmp_path: Path) -> None:
    """No value of the link is made while rank 2 is free, so it shows in pauses alone."""
    links = {(3, 2): 2.2}
    timeline = ran(make_schedule("zb-v", ranks=4, microbatches=8), Machine(links=links, jitter=0))
    found = explain([record(tmp_path / "traces", timeline)])
    assert (found.findings[0].kind, found.findings[0].where) == ("slow link", (3, 2))


def test_pauses_of_a_host_are_no_late_values(tmp_path: Path) -> None:
    """Rank 1 stands still before every action, also where it waited for a value."""
    timeline = ran(make_schedule("1f1b", ranks=4, microbatches=8), Machine(stalls={1: 1.0}))
    [found] = explain([record(tmp_path / "traces", timeline)]).findings
    assert (found.kind, found.where) == ("host stall", 1)


def test_a_step_without_a_fault_has_no_finding(tmp_path: Path) -> None:
    timeline = ran(make_schedule("1f1b", ranks=4, microbatches=8))
    assert explain([record(tmp_path / "traces", timeline)]).findings == ()


def test_idle_times_have_causes_and_fill_the_step(tmp_path: Path) -> None:
    timeline = ran(make_schedule("1f1b", ranks=4, microbatches=8), Machine(jitter=0))
    found = explain([record(tmp_path / "traces", timeline)])
    for rank, row in enumerate(found.timeline.rows):
        idle = [each for each in found.idle if each.rank == rank]
        busy = sum(span.end - span.start for span in row)
        assert busy + sum(each.end - each.start for each in idle) == pytest.approx(timeline.makespan, rel=0.01)
        assert [each.kind for each in idle if each.kind == "fill"] == ["fill"] * (rank > 0)
        assert [each.kind for each in idle if each.kind == "drain"] == ["drain"] * (rank > 0)
    assert any(each.cause == "0B0 waited for 1B0 on rank 1" for each in found.idle)
