"""Schedules go to torch.distributed.pipelining and come from it, as CSV. Its names for this are private; no process
runs.

torch cannot say a schedule of two directions (its validator wants every stage on one rank) nor one without backwards.
"""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipeflow.core.action import Action, Entry, Kind
from pipeflow.core.analysis.lowering import lower
from pipeflow.core.analysis.other_engines import lowered_csv
from pipeflow.core.analysis.simulation import simulate
from pipeflow.core.cost import CostModel
from pipeflow.core.dataflow import Content
from pipeflow.core.errors import UsageError
from pipeflow.core.placement import Placement
from pipeflow.core.program import Send
from pipeflow.core.schedule import Schedule
from pipeflow.core.soundness.verification import verify
from pipeflow.draw import picture
from pipeflow.schedules import SCHEDULES, make_schedule
from pipeflow.schedules.orders.additions import with_unshard

pytestmark = pytest.mark.slow  # it takes seconds to load torch's pipelining

SIZES = [(2, 3), (4, 4), (4, 9)]
OF_SHARDING = ("UNSHARD", "RESHARD", "REDUCE_GRAD", "WAIT_REDUCE_GRAD")  # the last since torch 2.15


@pytest.fixture(scope="module")
def theirs() -> Any:
    """torch's schedules."""
    return pytest.importorskip("torch.distributed.pipelining.schedules")


def stages(ranks: int, chunks: int) -> list[Any]:
    """What torch's schedules ask of stages before they run."""
    common = {"num_stages": ranks * chunks, "group_size": ranks, "group_rank": 0, "submod": None, "is_last": False}
    return [SimpleNamespace(stage_index=chunk * ranks, **common) for chunk in range(chunks)]


def loaded(theirs: Any, schedule: Schedule, path: Path) -> Any:
    """torch's runtime, which has validated and lowered the file."""
    path.write_text(schedule.to_csv(), encoding="utf-8")
    ranks = schedule.placement.num_ranks
    runtime = theirs._PipelineScheduleRuntime(
        stages(ranks, schedule.placement.num_stages // ranks), schedule.num_microbatches
    )
    runtime._load_csv(str(path))
    return runtime


def simulatable(runtime: Any) -> dict[int, list[Any]]:
    """What torch's runtime has loaded, without pairs and actions of sharding, which its simulator does not know."""
    order: dict[int, list[Any]] = {}
    for rank, row in runtime.pipeline_order_with_comms.items():
        known = [action for action in row if action.computation_type.name not in OF_SHARDING]
        order[rank] = [each for action in known for each in action.sub_actions or [action]]
    return order


def require_simulated(theirs: Any, runtime: Any, placement: Placement) -> None:
    """Fails unless torch's simulator runs what its runtime has loaded to the end."""
    order = simulatable(runtime)
    steps = theirs._simulate_comms_compute(order, placement.rank_of, placement.num_stages)
    assert {rank: [action for action in row if action] for rank, row in steps.items()} == order


def transfers_of(rank: int, schedule: Schedule) -> dict[str, list[tuple[int, int]]]:
    """What we would send from `rank`, in order."""
    sent = [step.value for step in lower(schedule)[rank].instructions if isinstance(step, Send)]
    names = {"SEND_F": Content.ACTIVATION, "SEND_B": Content.GRADIENT}
    return {
        name: [(value.stage, value.microbatch) for value in sent if value.content is content]
        for name, content in names.items()
    }


def one_way(name: str) -> bool:
    return len(make_schedule(name, ranks=4, microbatches=4).placement.paths) == 1


@pytest.mark.some(17)
@pytest.mark.parametrize(("ranks", "microbatches"), SIZES)
@pytest.mark.parametrize("name", [name for name in SCHEDULES if one_way(name)])
def test_torch_loads_runs_and_sends_the_same(
    theirs: Any, name: str, ranks: int, microbatches: int, tmp_path: Path
) -> None:
    schedule = make_schedule(name, ranks=ranks, microbatches=microbatches)
    runtime = loaded(theirs, schedule, tmp_path / "schedule.csv")
    assert tuple(tuple(map(str, runtime.pipeline_order[rank])) for rank in range(ranks)) == tuple(
        tuple(map(str, row)) for row in schedule.rows
    )
    holders = {stage: schedule.placement.rank_of(stage) for stage in range(schedule.placement.num_stages)}
    assert runtime.stage_index_to_group_rank == holders

    for rank, row in simulatable(runtime).items():
        for kind, values in transfers_of(rank, schedule).items():
            sends = [action for action in row if action.computation_type.name == kind]
            assert [(action.stage_index, action.microbatch_index) for action in sends] == values
    require_simulated(theirs, runtime, schedule.placement)


@pytest.mark.some(17)
@pytest.mark.parametrize(("ranks", "microbatches"), SIZES)
@pytest.mark.parametrize("name", [name for name in SCHEDULES if one_way(name)])
def test_torch_loads_and_simulates_what_we_lowered(
    theirs: Any, name: str, ranks: int, microbatches: int, tmp_path: Path
) -> None:
    schedule = make_schedule(name, ranks=ranks, microbatches=microbatches).with_reductions()
    path = tmp_path / "lowered.csv"
    path.write_text(lowered_csv(schedule.without_reductions()), encoding="utf-8")
    chunks = schedule.placement.num_stages // ranks
    runtime = theirs._PipelineScheduleRuntime(stages(ranks, chunks), microbatches)
    runtime._load_csv(str(path), format="compute_comms")
    require_simulated(theirs, runtime, schedule.placement)
    read = Schedule.from_csv(path.read_text(encoding="utf-8"), name=name)
    assert verify(read) == []
    assert read.without_unshards() == schedule


@pytest.mark.parametrize("name", ["1f1b", "zb-v", "dualpipe-v"])
def test_newer_tables_have_a_wait_for_each_send_and_each_reduction(name: str) -> None:
    """What torch 2.15 refuses a table without. Older torch knows no such words."""
    schedule = make_schedule(name, ranks=4, microbatches=8)
    text = lowered_csv(schedule, torch="2.15.0+cu128")
    for line in text.splitlines():
        line_cells = line.split(",")
        for cell in (cell for cell in line_cells if re.match(r"\d+(SEND|REDUCE)_", cell)):
            stage, word = re.fullmatch(r"(\d+)(.*)", cell).groups()  # type: ignore[union-attr]
            assert line_cells.index(f"{stage}WAIT_{word}") > line_cells.index(cell)
    assert Schedule.from_csv(text, name=name).without_unshards().without_reductions() == schedule
    waits = (cell for cell in re.split("[,\n]", text) if "WAIT" in cell)
    assert re.sub("|".join(f",{wait}\\b" for wait in waits), "", text) == lowered_csv(schedule, torch="2.13")


def test_what_is_no_version_is_refused() -> None:
    with pytest.raises(UsageError, match=r'torch must be a version such as "2\.15", got \'nightly\''):
        lowered_csv(make_schedule("1f1b", ranks=2, microbatches=2), torch="nightly")


@pytest.mark.parametrize("name", [name for name in SCHEDULES if one_way(name)])
def test_torch_reduces_where_we_do(theirs: Any, name: str, tmp_path: Path) -> None:
    schedule = make_schedule(name, ranks=4, microbatches=8)
    lowered = loaded(theirs, schedule, tmp_path / "schedule.csv").pipeline_order_with_comms
    rows = [[str(action) for action in lowered[rank] if action.is_compute_op or reduces(action)] for rank in range(4)]
    text = "".join(",".join(row) + "\n" for row in rows)
    assert text == schedule.with_reductions().to_csv()
    assert Schedule.from_csv(text, schedule.placement, name=schedule.name) == schedule.with_reductions()


@pytest.mark.parametrize("name", [name for name in SCHEDULES if not one_way(name)])
def test_torch_cannot_say_two_directions(theirs: Any, name: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="is assigned to both rank"):
        loaded(theirs, make_schedule(name, ranks=4, microbatches=8), tmp_path / "schedule.csv")


def test_torch_cannot_say_forwards_alone(theirs: Any, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="Invalid backward microbatches"):
        loaded(theirs, make_schedule("1f1b", ranks=2, microbatches=2).forward_only(), tmp_path / "schedule.csv")


MULTI = [
    ("Interleaved1F1B", "interleaved-1f1b", 2),
    ("Interleaved1F1B", "interleaved-1f1b", 3),
    ("LoopedBFS", "looped-bfs", 2),
    ("InterleavedZeroBubble", "interleaved-zb", 2),
    ("ZBVZeroBubble", "zb-v", 2),
    ("DualPipeV", "dualpipe-v", 2),
]


@pytest.mark.parametrize(("theirs_name", "name", "chunks"), MULTI, ids=lambda value: str(value))
@pytest.mark.parametrize("microbatches", [8, 16])
def test_torch_exports_what_we_read_verify_simulate_and_draw(
    theirs: Any, theirs_name: str, name: str, chunks: int, microbatches: int, tmp_path: Path
) -> None:
    path = tmp_path / "schedule.csv"
    exported = theirs.get_schedule_class(theirs_name)(stages(4, chunks), microbatches)
    exported._dump_csv(str(path), format="compute_only")
    vee = name in ("zb-v", "dualpipe-v")
    schedule = Schedule.from_csv(path.read_text(encoding="utf-8"), name=name)
    assert schedule.placement == (Placement.vee(4) if vee else Placement.looped(4, chunks))  # as its lines show it
    assert verify(schedule) == []
    assert schedule.num_microbatches == microbatches
    passes = CostModel.even(schedule.placement, chunks, chunks, chunks)
    timeline = simulate(schedule, passes)
    assert timeline.work == 3 * chunks * microbatches
    drawn = picture(timeline).splitlines()
    assert [line.split()[:2] for line in drawn] == [["rank", str(rank)] for rank in range(4)]
    if name in SCHEDULES:
        options = {} if vee else {"chunks": chunks}
        ours = simulate(make_schedule(name, ranks=4, microbatches=microbatches, **options), passes)
        assert timeline.makespan == ours.makespan
        assert timeline.peak_activations == ours.peak_activations


@pytest.mark.some(8)
@pytest.mark.parametrize(("theirs_name", "name", "chunks"), MULTI, ids=lambda value: str(value))
@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (2, 8), (4, 8), (4, 16), (8, 16)])
def test_what_torch_lowered_goes_round(
    theirs: Any, theirs_name: str, name: str, chunks: int, ranks: int, microbatches: int, tmp_path: Path
) -> None:
    path = tmp_path / "lowered.csv"
    made = theirs.get_schedule_class(theirs_name)(stages(ranks, chunks), microbatches)
    made._dump_csv(str(path), format="compute_only")
    order = Schedule.from_csv(path.read_text(encoding="utf-8"), name=name)
    made._dump_csv(str(path), format="compute_comms")
    read = Schedule.from_csv(path.read_text(encoding="utf-8"), name=name)
    assert read.without_unshards() == order.with_reductions()
    assert verify(read) == []
    path.write_text(lowered_csv(read), encoding="utf-8")
    runtime = theirs._PipelineScheduleRuntime(stages(ranks, chunks), microbatches)
    runtime._load_csv(str(path), format="compute_comms")
    require_simulated(theirs, runtime, order.placement)
    again = Schedule.from_csv(path.read_text(encoding="utf-8"), name=name)
    assert again.without_unshards() == order.with_reductions()


def single(theirs: Any, theirs_name: str) -> Schedule:
    """What torch draws of a schedule with one stage a rank."""
    exported = theirs.get_schedule_class(theirs_name)(stages(4, 1)[0], 8)
    rows = [
        ",".join("" if action is None else str(action) for action in exported.pipeline_order[rank]) for rank in range(4)
    ]
    return Schedule.from_csv("\n".join(rows), num_microbatches=8 if theirs_name == "GPipe" else None)


def reduces(action: Any) -> bool:
    return bool(action.computation_type.name == "REDUCE_GRAD")


def test_gpipe_of_torch_is_ours(theirs: Any) -> None:
    assert single(theirs, "GPipe").rows == make_schedule("gpipe", ranks=4, microbatches=8).with_reductions().rows


def test_1f1b_of_torch_is_drawn_wrong_on_the_last_rank(theirs: Any) -> None:
    """It runs another order there: its drawing counts that rank's forwards from 1."""
    drawn, ours = single(theirs, "1F1B"), make_schedule("1f1b", ranks=4, microbatches=8).with_reductions()
    assert drawn.rows[:3] == ours.rows[:3]
    wrong = Schedule("1F1B", drawn.placement, 8, drawn.rows)
    assert [str(violation) for violation in verify(wrong)] == [
        "rank 3, position 14: 3F8 does not exist; expected stages 0..3 and microbatches 0..7",
        "rank 3: 3F0 is missing: stage 3 runs 3B0 for microbatch 0",
    ]


@pytest.mark.some(6)
@pytest.mark.parametrize("microbatches", [4, 8])
@pytest.mark.parametrize("name", [name for name in SCHEDULES if one_way(name)])
def test_torch_unshards_where_we_do(theirs: Any, name: str, microbatches: int, tmp_path: Path) -> None:
    schedule = make_schedule(name, ranks=4, microbatches=microbatches)
    lowered = loaded(theirs, schedule, tmp_path / "schedule.csv").pipeline_order_with_comms
    rows = [[str(each) for each in lowered[rank] if each.is_compute_op or shards(each)] for rank in range(4)]
    read = Schedule.from_csv("\n".join(map(",".join, rows)), schedule.placement, microbatches, name=schedule.name)
    assert verify(read) == []
    assert read.without_unshards() == schedule
    ours = with_unshard(schedule)
    assert [whole(row) for row in read.rows] == [whole(row) for row in ours.rows]
    for most in (1, 2, 3):
        theirs_rows = [theirs._add_unshard_reshard(loaded_row, most) for loaded_row in rows_of(theirs, schedule)]
        try:
            mine = with_unshard(schedule, most=most)
        except UsageError:  # more often than it has microbatches
            continue
        texts = "\n".join(",".join(map(str, row)) for row in theirs_rows)
        assert [whole(row) for row in Schedule.from_csv(texts, schedule.placement).rows] == [
            whole(row) for row in mine.rows
        ]


def rows_of(theirs: Any, schedule: Schedule) -> list[list[Any]]:
    return [[theirs._Action.from_str(str(entry)) for entry in row] for row in schedule.rows]


def shards(action: Any) -> bool:
    return action.computation_type.name in ("UNSHARD", "RESHARD")


def whole(row: tuple[Entry, ...]) -> list[tuple[str, frozenset[int]]]:
    """Per computation of a row, the stages whose weights are whole."""
    stages: set[int] = set()
    found = []
    for entry in row:
        if isinstance(entry, Action) and entry.kind is Kind.U:
            stages.add(entry.stage)
        elif isinstance(entry, Action) and entry.kind is Kind.H:
            stages.remove(entry.stage)
        else:
            found.append((str(entry), frozenset(stages)))
    return found
