"""Jobs without a pipeline: where the time of a step goes, which ranks wait, and what is not told of them."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from math import fsum
from pathlib import Path
from typing import Any

import pytest

from pipeflow.core.errors import UsageError
from pipeflow.schedules import make_schedule
from pipeflow.tools.traces.explanation import explain
from pipeflow.tools.traces.jobs import Job
from pipeflow.tools.traces.rank_times import RankTimes
from tests.cli.run import error, out
from tests.traces.recording import ran, record

Raw = dict[str, Any]
ZERO = 1e9  # microseconds at which times of these traces count
LOADER = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"


def event(category: str, name: str, start: float, end: float, **given: Any) -> Raw:
    """An event from a start to an end in milliseconds."""
    times = {"ts": ZERO + 1e3 * start, "dur": 1e3 * (end - start)}
    return {"ph": "X", "cat": category, "name": name, **times, "args": given}


def note(name: str, start: float, end: float) -> Raw:
    return event("user_annotation", name, start, end)


def kernel(name: str, start: float, end: float, launched: float | None = None, **given: Any) -> list[Raw]:
    """A kernel, or what its category says before a colon, and its launch, if that is known."""
    category, _, own = name.rpartition(":")
    number = round(1e6 * start) + 7 * len(name)
    ran_there = event(category or "kernel", own, start, end, correlation=number, **given)
    if launched is None:
        return [ran_there]
    return [event("cuda_runtime", "cudaLaunchKernel", launched, launched + 0.01, correlation=number), ran_there]


def explained(folder: Path, *ranks: list[Raw], **info: Any) -> Job:
    """Explains a trace per rank, as a job."""
    found = explain([written(folder, *ranks, **info)])
    assert isinstance(found, Job)
    for each in found.ranks:
        assert fsum(each.parts.values()) == pytest.approx(each.seconds)
    return found


def written(folder: Path, *ranks: list[Raw], base: int = 0, **info: Any) -> Path:
    for rank, events in enumerate(ranks):
        group = {"rank": rank, "world_size": len(ranks)} | info
        whole = {"distributedInfo": group, "baseTimeNanoseconds": base, "traceEvents": events}
        (folder / f"rank{rank}.json").write_text(json.dumps(whole), encoding="utf-8")
    return folder


def milliseconds(times: RankTimes) -> dict[tuple[str, str], Any]:
    return {key: pytest.approx(1e3 * seconds, abs=1e-4) for key, seconds in times.parts.items()}


def test_each_moment_of_a_device_is_of_one_part(tmp_path: Path) -> None:
    gather = {"Collective name": "_allgather_base", "Process Group Ranks": "[0]"}
    found = explained(
        tmp_path,
        [
            note("ProfilerStep#4", 0, 100),
            note(LOADER, 0, 20),
            note("read", 5, 15),
            *kernel("gemm", 25, 45, 22),
            *kernel("ncclDevKernel_AllGather", 40, 55, 30, **gather),
            *kernel("gpu_memcpy:Memcpy HtoD", 50, 60, 31),
            *kernel("gemm", 60.1, 70, 60.05),
            note("checkpoint", 69, 80),
            event("cpu_op", "aten::copy_", 82, 84),
            note("Optimizer.step#AdamW.step", 85, 95),
            *kernel("adam", 86, 90, 85.5),
            *kernel("gemm", 90, 91, 84.5),
        ],
    )
    [only] = found.ranks
    assert only.on_device
    assert milliseconds(only) == {
        ("computes", ""): 20 + 9.9 + 1,
        ("optimizer", ""): 4 + 4,  # its kernel, and the time after it
        ("data loading", ""): 20,
        ("all-gather", ""): 10,
        ("copies", ""): 5,
        ("launch", ""): 3 + 0.05 + 1.5,
        ("host", ""): 0.05,
        ("pauses", "checkpoint"): 10,
        ("pauses", "aten::copy_"): 2,
        ("pauses", ""): 2 + 2 + 0.5 + 5,
    }
    [gathered] = only.communications
    assert gathered[:2] == ("all-gather", 1)
    assert [1e3 * gathered.seconds, 1e3 * gathered.hidden] == pytest.approx([15, 5])


def step_of_rank(computes: float, gathers: float, group: str = "[0, 1]", offset: float = 0.0) -> list[Raw]:
    """A step of 50 ms: it computes so long, and then takes part in a gather until 40 ms or so."""
    taking = kernel("ncclDevKernel_AllGather", computes, computes + gathers, 2, **{"Process Group Ranks": group})
    events = [note("ProfilerStep#0", 0, 50), *kernel("gemm", 1, computes, 0.5), *taking]
    return [each | {"ts": each["ts"] + 1e3 * offset} for each in events]


def test_the_rank_that_comes_last_is_told_without_a_common_clock(tmp_path: Path) -> None:
    found = explained(tmp_path, step_of_rank(10, 30), step_of_rank(35, 5, offset=7000.0))
    early, late = (milliseconds(each) for each in found.ranks)
    assert (early["waiting", "rank 1"], early["all-gather", ""]) == (25, 5)
    assert late["all-gather", ""] == 5
    assert not any(kind == "waiting" for kind, _ in late)
    assert found.findings[0].seconds == pytest.approx(0.025)
    why = "which comes last to 1 of its 1 collectives: it computes 3.78 times as long as they do"
    assert found.findings[0].text == f"the other ranks wait for rank 1, {why}"
    assert not found.notes


def test_collectives_of_other_groups_are_not_compared(tmp_path: Path) -> None:
    """Rank 3 is slow in its own group, and nobody else waits for it."""
    pairs = [
        step_of_rank(10, 30),
        step_of_rank(12, 28),
        *(step_of_rank(each, 41 - each, "[2, 3]") for each in (10, 36)),
    ]
    found = explained(tmp_path, *pairs)
    assert [1e3 * each.part("waiting") for each in found.ranks] == pytest.approx([2, 0, 26, 0], abs=1e-4)


@pytest.mark.parametrize(("late", "waits"), [(0.0, [25, 0]), (9.0, [0, 0])])
def test_without_groups_collectives_must_end_at_once(late: float, waits: list[float], tmp_path: Path) -> None:
    found = explained(tmp_path, step_of_rank(10, 30, ""), step_of_rank(35, 5, "", offset=late))
    assert [1e3 * each.part("waiting") for each in found.ranks] == pytest.approx(waits, abs=1e-4)
    cannot = "waiting for other ranks is counted as communication in all-gather: nothing shows which rank came last"
    assert found.notes == ((cannot,) if late else ())


def test_ranks_with_unlike_numbers_of_collectives_are_not_compared(tmp_path: Path) -> None:
    more = kernel("ncclDevKernel_AllGather", 42, 45, 3, **{"Process Group Ranks": "[0, 1]"})
    found = explained(tmp_path, step_of_rank(10, 30), [*step_of_rank(35, 5), *more])
    assert not any(each.part("waiting") for each in found.ranks)
    assert found.notes[0].endswith("in all-gather: nothing shows which rank came last")


def test_only_collectives_of_the_step_are_matched(tmp_path: Path) -> None:
    before = kernel("ncclDevKernel_AllGather", -9, -5, -10, **{"Process Group Ranks": "[0, 1]"})
    found = explained(tmp_path, [*before, *step_of_rank(10, 30)], step_of_rank(35, 5))
    assert found.ranks[0].part("waiting") == pytest.approx(0.025)


def test_a_rank_that_does_nothing_longer_comes_last_for_no_reason_that_is_told(tmp_path: Path) -> None:
    """Rank 1 is late once, and rank 0 the other time, as much as all parts of both are equal."""
    again = {"Process Group Ranks": "[0, 1]"}
    second = [kernel("ncclDevKernel_AllGather", start, 49, 3, **again) for start in (40, 48)]
    found = explained(tmp_path, [*step_of_rank(10, 30), *second[1]], [*step_of_rank(10, 22), *second[0]])
    texts = [each.text for each in found.findings if each.kind == "last rank"]
    assert texts == [
        "the other ranks wait for rank 0, which comes last to 1 of its 2 collectives",
        "the other ranks wait for rank 1, which comes last to 1 of its 2 collectives",
    ]


def test_of_one_rank_nothing_is_guessed(tmp_path: Path) -> None:
    found = explained(tmp_path, step_of_rank(10, 30), world_size=2)
    assert found.ranks[0].part("all-gather") == pytest.approx(0.03)
    assert found.notes == (
        "1 of 2 ranks were recorded: what others wait for is not known",
        "waiting for other ranks is counted as communication in all-gather: one rank alone does not show it",
    )


def host_step(*others: Raw) -> list[Raw]:
    """Operators for 20 ms, with an exchange from 10 ms to 30 ms, in a step of 40 ms."""
    return [
        note("ProfilerStep#0", 0, 40),
        event("cpu_op", "aten::mm", 0, 20),
        event("cpu_op", "autograd::engine::evaluate_function: MmBackward0", 0, 38),
        event("cpu_op", "c10d::_reduce_scatter_base_", 9, 9.5),
        note("gloo:all_reduce", 10, 30),
        *others,
    ]


def test_operators_of_the_host_compute_where_no_device_is(tmp_path: Path) -> None:
    one = {"pg_config": [{"pg_name": "0", "ranks": [0, 1]}]}
    updates = [note("Optimizer.step#SGD.step", 35, 40), event("cpu_op", "aten::add_", 36, 37)]
    later = [each | {"ts": each["ts"] + 5e3 * (each["name"] == "gloo:all_reduce")} for each in host_step(*updates)]
    found = explained(tmp_path, host_step(*updates), later, **one)
    assert not found.ranks[0].on_device
    assert milliseconds(found.ranks[0]) == {
        ("computes", ""): 20,
        ("reduce-scatter", ""): 10,
        ("optimizer", ""): 5,
        ("pauses", ""): 5,
    }
    assert [found.findings[0].kind, found.findings[0].seconds] == ["reduce-scatter", pytest.approx(0.015)]
    assert "25% of its time is hidden" in found.findings[0].text


def test_waiting_on_the_host_is_told_if_there_is_one_group(tmp_path: Path) -> None:
    shorter = [each | {"dur": 4e3, "ts": each["ts"] + 9e3} if "gloo" in each["name"] else each for each in host_step()]
    groups = [{"pg_name": "0", "ranks": [0, 1]}, {"pg_name": "1", "ranks": [0, 1]}]
    found = explained(tmp_path, host_step(), shorter, pg_config=groups[:1])
    assert found.ranks[0].parts["waiting", "rank 1"] == pytest.approx(0.006)  # of 16 ms, 10 are hidden
    assert not explained(tmp_path, host_step(), shorter, pg_config=groups).ranks[0].part("waiting")


def test_operators_of_a_data_loader_are_data_loading(tmp_path: Path) -> None:
    found = explained(tmp_path, [note(LOADER, 0, 10), *(event("cpu_op", "aten::mm", at, at + 6) for at in (2, 10))])
    assert milliseconds(found.ranks[0]) == {("data loading", ""): 10, ("computes", ""): 6}


def test_kernels_that_overlap_count_once(tmp_path: Path) -> None:
    found = explained(tmp_path, [*kernel("gemm", 0, 10, -5), *kernel("gemm", 5, 15, -4), note("all", -5, 15)])
    assert milliseconds(found.ranks[0]) == {("launch", ""): 5, ("computes", ""): 15}


def test_a_pause_is_named_by_what_began_last(tmp_path: Path) -> None:
    events = [
        *kernel("gemm", 0, 10, -1),
        note("outer", 10, 40),
        note("inner", 15, 20),
        event("cuda_runtime", "cudaMalloc", 25, 30, correlation=5),
        event("cpu_op", "c10d::barrier", 32, 36),
    ]
    parts = milliseconds(explained(tmp_path, events).ranks[0])
    pauses = {cause: seconds for (kind, cause), seconds in parts.items() if kind == "pauses"}
    assert pauses == {"outer": 5 + 5 + 2 + 4, "inner": 5, "cudaMalloc": 5, "c10d::barrier": 4}


def test_times_count_from_the_base_of_a_file(tmp_path: Path) -> None:
    events = [
        note("ProfilerStep#0", 0, 40),
        *kernel("gemm", 5, 10, 4),
        *kernel("gpu_memcpy:Memcpy", 10, 20, 6),
        *kernel("ncclKernel_SendRecv", 20, 30, 7),
        note("nccl:all_to_all", 6.9, 7.1),
        note("read", 30, 40),
        event("cuda_runtime", "cudaMalloc", 0, 2, correlation=5),
    ]
    found = [milliseconds(explained(tmp_path, events, base=base).ranks[0]) for base in (0, 10**15)]
    assert found[0] == found[1]
    assert ("all-to-all", "") in found[0]


@pytest.mark.parametrize(
    ("named", "kind"),
    [("nccl:all_to_all", "all-to-all"), ("nccl:_reduce_scatter_base", "reduce-scatter"), ("nccl:coalesced", "other")],
)
def test_what_a_kernel_exchanges_is_what_the_host_called(named: str, kind: str, tmp_path: Path) -> None:
    events = [*kernel("gemm", 0, 5, -1), *kernel("ncclKernel_SendRecv_RING", 5, 8, 4), note(named, 3.9, 4.1)]
    assert explained(tmp_path, events).ranks[0].communications[0].kind == kind


@pytest.mark.parametrize(("named", "called"), [("nccl:send 0->1", ""), ("", ""), ("", "coalesced"), ("", "recv")])
def test_what_may_send_to_another_rank_is_no_job(named: str, called: str, tmp_path: Path) -> None:
    given = {"Collective name": called} if called else {}
    events = [*kernel("gemm", 0, 5, -1), *kernel("ncclKernel_SendRecv_RING", 5, 8, 4, **given)]
    events += [note(named, 3.9, 4.1)] * bool(named)
    with pytest.raises(UsageError, match="shows no forward or backward"):
        explain([written(tmp_path, events)])


def test_a_group_of_a_pipeline_is_no_job(tmp_path: Path) -> None:
    group = [{"pg_name": "1", "pg_desc": "mesh_pp", "ranks": [0, 1]}]
    with pytest.raises(UsageError, match="shows no forward or backward"):
        explain([written(tmp_path, step_of_rank(10, 30), pg_config=group)])


def test_a_pipeline_of_one_rank_each_keeps_all_ranks(tmp_path: Path) -> None:
    """Megatron describes groups of one rank, too."""
    group = [{"pg_name": str(each), "pg_desc": "PIPELINE_MODEL_PARALLEL_GROUP", "ranks": [each]} for each in (0, 1)]
    assert len(explained(tmp_path, step_of_rank(10, 30), step_of_rank(35, 5), pg_config=group).ranks) == 2


def test_names_that_are_given_are_those_of_a_pipeline(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="shows no forward or backward"):
        explain([written(tmp_path, step_of_rank(10, 30))], names="(?P<kind>fwd|bwd)")


def test_a_pipeline_whose_sends_are_lost_stays_one_if_names_say_it(tmp_path: Path) -> None:
    folder = record(tmp_path / "traces", ran(make_schedule("1f1b", ranks=2, microbatches=4)), ranks=range(1))
    whole = json.loads((folder / "rank0.json").read_text(encoding="utf-8"))
    whole["traceEvents"] = [each for each in whole["traceEvents"] if "c10d" not in each["name"]]
    (folder / "rank0.json").write_text(json.dumps(whole), encoding="utf-8")
    with pytest.raises(UsageError, match="1 of 2 ranks were recorded"):
        explain([folder])


def test_names_of_actions_on_several_ranks_are_those_of_a_pipeline(tmp_path: Path) -> None:
    """Whatever these ranks sent, it was not recorded."""
    ranks = [[note("forward_step", 0, 10), event("cpu_op", "aten::mm", 0, 10, **{"Sequence number": 1})]] * 2
    with pytest.raises(UsageError, match="no step is there from its first forward to its last backward"):
        explain([written(tmp_path, *ranks)])


def test_a_number_in_the_name_of_an_only_file_is_no_rank(tmp_path: Path) -> None:
    events = json.dumps({"traceEvents": [event("cpu_op", "aten::mm", 0, 10)]})
    (tmp_path / "host_4711.json").write_text(events, encoding="utf-8")
    assert isinstance(found := explain([tmp_path]), Job)
    assert found.ranks[0].rank == 0


def test_ranks_that_only_sum_are_no_pipeline(tmp_path: Path) -> None:
    folder = record(tmp_path / "traces", ran(make_schedule("1f1b", ranks=3, microbatches=8)), name=None)
    for path in folder.iterdir():
        whole = json.loads(path.read_text(encoding="utf-8"))
        kept = [each for each in whole["traceEvents"] if "c10d" not in each["name"]]
        whole["traceEvents"] = [*kept, kept[-1] | {"cat": "cpu_op", "name": "c10d::allreduce_", "args": {}}]
        path.write_text(json.dumps(whole), encoding="utf-8")
    assert isinstance(found := explain([folder]), Job)
    assert [each.rank for each in found.ranks] == [0, 1, 2]


def test_the_median_step_is_told_and_longer_ones_are_named(tmp_path: Path) -> None:
    marks = [(0, 10), (10, 25), (25, 36), (36, 46), (46, 57)]
    events = [note(f"ProfilerStep#{number}", start, end - 1) for number, (start, end) in enumerate(marks)]
    found = explained(tmp_path, [*events, event("cpu_op", "aten::mm", 0, 60)])
    assert [1e3 * each for each in found.step_seconds] == pytest.approx([10, 15, 11, 10, 10], abs=1e-4)
    assert (found.by, found.outliers) == ("mark", (1,))
    assert 1e3 * found.seconds == pytest.approx(10, abs=1e-4)


def test_without_marks_steps_are_those_of_the_first_optimizer(tmp_path: Path) -> None:
    ends = [("Adam", 10), ("SGD", 14), ("Adam", 30), ("SGD", 34), ("Adam", 52)]
    events = [note(f"Optimizer.step#{name}.step", end - 2, end) for name, end in ends]
    found = explained(tmp_path, [*events, event("cpu_op", "aten::mm", 0, 60)])
    assert [1e3 * each for each in found.step_seconds] == pytest.approx([20, 22], abs=1e-4)
    assert found.by == "update"


def test_what_nothing_divides_is_the_recording(tmp_path: Path) -> None:
    found = explained(tmp_path, [event("cpu_op", "aten::mm", 3, 60), note("read", 60, 80)])
    assert found.by == "recording"
    assert 1e3 * found.seconds == pytest.approx(77, abs=1e-4)
    assert found.notes[0].startswith("nothing divides the recording into steps")


def test_kernels_without_launches_do_not_say_why_a_device_is_idle(tmp_path: Path) -> None:
    found = explained(tmp_path, [*kernel("gemm", 0, 10), *kernel("gemm", 30, 40), note("read", 10, 30)])
    assert milliseconds(found.ranks[0]) == {("computes", ""): 20, ("idle", ""): 20}
    assert any("nothing says when kernels were launched" in each for each in found.notes)


def test_a_host_whose_device_was_not_recorded_says_so(tmp_path: Path) -> None:
    launch = event("cuda_runtime", "cudaLaunchKernel", 1, 2, correlation=3)
    found = explained(tmp_path, [event("cpu_op", "aten::mm", 0, 60), launch])
    assert any("what ran there was not recorded" in each for each in found.notes)


def test_categories_of_older_torch(tmp_path: Path) -> None:
    now = [*kernel("gemm", 0, 10, -5), *kernel("gpu_memcpy:Memcpy", 12, 20, -4), event("cpu_op", "aten::mm", -8, -3)]
    then = {"kernel": "Kernel", "gpu_memcpy": "Memcpy", "cuda_runtime": "Runtime", "cpu_op": "Operator"}
    for name, events in (("now", now), ("then", [each | {"cat": then[each["cat"]]} for each in now])):
        (tmp_path / name).mkdir()
        parts = milliseconds(explained(tmp_path / name, events).ranks[0])
        assert (parts["computes", ""], parts["copies", ""]) == (10, 8)


def test_long_pauses_are_told_with_what_names_them(tmp_path: Path) -> None:
    work = [event("cpu_op", "aten::mm", start, start + 5) for start in (0, 85)]
    found = explained(tmp_path, [note("ProfilerStep#0", 0, 90), *work, note("save {x}", 5, 75)])
    assert found.findings[0].text == "no operator runs in long pauses; of them, the host is in 'save {x}' 88%"
    found = explained(tmp_path, [note("ProfilerStep#0", 0, 90), *work, note("save", 5, 25)])
    nothing = "nothing names what the host does then: use torch.profiler.record_function"
    said = f"no operator runs in long pauses; of them, the host is in 'save' 25%; {nothing}"
    assert found.findings[0].text == said


def test_data_loading_says_where_it_runs(tmp_path: Path) -> None:
    loads = note(LOADER, 10, 40)
    alone = explained(tmp_path, [event("cpu_op", "aten::mm", 0, 10), loads])
    assert (
        alone.findings[0].text == "the data loader runs and nothing else; it is in the process itself: set num_workers"
    )
    several = loads | {"name": LOADER.replace("Single", "MultiProcessing")}
    found = explained(tmp_path, [event("cpu_op", "aten::mm", 0, 10), several])
    assert found.findings[0].text.endswith("try more workers or a longer prefetch")


def test_exports_of_nsight_systems_with_copies(tmp_path: Path) -> None:
    path = tmp_path / "rank0.sqlite"
    with closing(sqlite3.connect(path)) as connection:
        run = connection.execute
        run("CREATE TABLE StringIds (id INTEGER, value TEXT)")
        run("INSERT INTO StringIds VALUES (1, 'gemm'), (2, 'ncclDevKernel_AllReduce_Sum'), (3, 'read')")
        run("CREATE TABLE NVTX_EVENTS (start INTEGER, end INTEGER, text TEXT, textId INTEGER)")
        run("INSERT INTO NVTX_EVENTS VALUES (0, 50000000, NULL, 3)")
        run("CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start INTEGER, correlationId INTEGER)")
        run("INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (0, 1), (1, 2), (2, 3)")
        columns = "start INTEGER, end INTEGER, correlationId INTEGER"
        run(f"CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL ({columns}, shortName INTEGER)")
        run("INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (0, 10000000, 1, 1), (8000000, 20000000, 2, 2)")
        run(f"CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY ({columns})")
        run("INSERT INTO CUPTI_ACTIVITY_KIND_MEMCPY VALUES (20000000, 26000000, 3)")
        connection.commit()
    found = explain([path])
    assert isinstance(found, Job)
    parts = {("computes", ""): 10, ("all-reduce", ""): 10, ("copies", ""): 6, ("pauses", "read"): 24}
    assert milliseconds(found.ranks[0]) == parts


def test_printed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    written(tmp_path, step_of_rank(10, 30), step_of_rank(35, 5))
    shown = out(capsys, "explain", tmp_path)
    assert shown.startswith("A step takes 50 ms; what stands out most: the other ranks wait for rank 1, ")
    assert "\nno pipeline shows: 2 ranks, none of which sends to a single other one\nstep, from its mark" in shown
    assert ["0", "9", "5", "25", "0.5", "10.5", "50"] in [line.split() for line in shown.splitlines()]
    read = json.loads(out(capsys, "explain", tmp_path, "--json"))
    assert (read["pipeline"], read["step_seconds"]) == (False, pytest.approx(0.05))
    for each in read["ranks"]:
        assert fsum(part["seconds"] for part in each["parts"]) == pytest.approx(each["seconds"])
    assert read["findings"][0]["kind"] == "last rank"
    for option in ("--csv", "--best", "--html", "--svg"):
        why = f"{option} is not read for a job without a pipeline, which has no schedule: leave it out"
        assert why in error(capsys, "explain", tmp_path, option, tmp_path / "new")


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("void deep_ep::intranode::dispatch<8, 768, 8192>(int4*, float*)", "all-to-all"),
        ("void dpsk::ep::internode::combine<false, 8, __nv_bfloat16>(int4*, float*)", "all-to-all"),
        ("void deep_ep::internode_ll::dispatch<true, 10>(void*)", "all-to-all"),
        ("nvshmemi_alltoall_kernel", "all-to-all"),
        ("rocshmem_barrier", "other"),
        ("void deep_ep::layout::get_dispatch_layout<256>(long const*)", None),
        ("void pack<deep_ep::internode::SourceMeta>(int4*)", None),
        ("void moe::combine<float>(float*)", None),
    ],
)
def test_kernels_that_exchange_tokens_of_experts_do_not_compute(name: str, kind: str | None, tmp_path: Path) -> None:
    found = explained(tmp_path, [*kernel("gemm", 0, 5, -1), event("kernel", name, 5, 8)]).ranks[0]
    assert [each.kind for each in found.communications] == ([] if kind is None else [kind])
    assert found.part("computes") == pytest.approx(5e-3 if kind else 8e-3)


def ring(begin: float, *, receives_first: bool = False) -> list[Raw]:
    """A step of ring attention: its parts are passed on within the forward, and within a node of the backward."""

    def operator(number: int, start: float, end: float) -> Raw:
        return event("cpu_op", "aten::mm", start, end, **{"Sequence number": number, "Fwd thread id": 0})

    def node(number: int, start: float, end: float) -> Raw:
        name = "autograd::engine::evaluate_function: RingBackward"
        return event("cpu_op", name, start, end, **{"Sequence number": number, "Fwd thread id": 1})

    def passed(start: float) -> list[Raw]:
        both = (("c10d::send", "gloo:send"), ("c10d::recv_", "gloo:recv"))
        return [
            event(category, name, start + place / 2, start + place / 2 + 1.5)
            for place, names in enumerate(both)
            for category, name in zip(("cpu_op", "user_annotation"), names, strict=True)
        ]

    events = [
        *(event("cpu_op", "c10d::recv_", 1, 1.1) for _ in range(receives_first)),
        operator(1, 2, 5),
        *passed(5),
        operator(2, 7, 9),
        node(2, 10, 14),
        *passed(12),
        node(1, 14, 18),
        event("cpu_op", "c10d::allreduce_", 19, 20),
        event("user_annotation", "gloo:all_reduce", 19, 20),
    ]
    moved = [each | {"ts": each["ts"] + 1e3 * begin} for each in events]
    return [note("ProfilerStep#1", begin, begin + 25), *moved]


def test_sends_of_ring_attention_are_no_pipeline(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    found = explained(tmp_path, ring(0), ring(0.3))
    assert {each.kind for each in found.ranks[0].communications} == {"send/receive", "all-reduce"}
    shown = " ".join(out(capsys, "explain", tmp_path).split())
    assert "no pipeline shows: 2 ranks, all of whose sends are parts of their forwards and backwards" in shown
    assert "sends and receives that no computation hides" in shown
    with pytest.raises(UsageError, match="fits no pipeline"):  # rank 1 waits for a value before its first forward
        explain([written(tmp_path, ring(0), ring(0.3, receives_first=True))])
