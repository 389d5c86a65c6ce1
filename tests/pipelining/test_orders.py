"""The orders of torch's classes are pipeflow's, and equal torch's own where that is the published one. No step runs."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipeflow import UsageError, make_schedule, verify

pytestmark = pytest.mark.slow  # it takes seconds to load torch's pipelining


@pytest.fixture(scope="module")
def ours() -> Any:
    return pytest.importorskip("pipeflow.pipelining.schedules")


@pytest.fixture(scope="module")
def theirs() -> Any:
    return pytest.importorskip("torch.distributed.pipelining.schedules")


def made(kind: Any, base: Any, ranks: int, microbatches: int) -> Any:
    """A schedule of a class, with what it asks of stages before it runs."""
    chunks = 2 if issubclass(kind, base) else 1
    stages = [
        SimpleNamespace(
            stage_index=chunk * ranks,
            num_stages=ranks * chunks,
            group_size=ranks,
            group_rank=0,
            submod=None,
            is_last=False,
            stage_index_to_group_rank={stage: stage % ranks for stage in range(ranks * chunks)},
        )
        for chunk in range(chunks)
    ]
    return kind(stages if chunks == 2 else stages[0], microbatches, loss_fn=len)


def computations(order: Any) -> list[list[str]]:
    return [[str(each) for each in order[rank] if each and "REDUCE" not in str(each)] for rank in sorted(order)]


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (3, 6), (4, 8)])
@pytest.mark.parametrize("name", ["GPipe", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"])
def test_an_order_is_torchs(ours: Any, theirs: Any, name: str, ranks: int, microbatches: int) -> None:
    mine, its = (
        made(each.get_schedule_class(name), each.PipelineScheduleMulti, ranks, microbatches) for each in (ours, theirs)
    )
    assert computations(mine.pipeline_order) == computations(its.pipeline_order)
    assert mine.schedule.num_microbatches == microbatches
    assert not verify(mine.schedule)


def test_one_f_one_b_is_torchs_except_for_its_last_row(ours: Any, theirs: Any) -> None:
    """There torch counts forwards from 1; it never runs that table."""
    kinds = [each.get_schedule_class("1F1B") for each in (ours, theirs)]
    mine, its = (computations(made(kind, theirs.PipelineScheduleMulti, 3, 4).pipeline_order) for kind in kinds)
    assert mine[:-1] == its[:-1]
    assert mine[-1] == ["2F0", "2B0", "2F1", "2B1", "2F2", "2B2", "2F3", "2B3"]
    assert its[-1] == ["2F1", "2B0", "2F2", "2B1", "2F3", "2B2", "2F4", "2B3"]


def test_looped_bfs_begins_its_backwards_with_microbatch_0(ours: Any, theirs: Any) -> None:
    mine, its = (made(each.ScheduleLoopedBFS, each.PipelineScheduleMulti, 2, 3) for each in (ours, theirs))
    assert computations(mine.pipeline_order)[1][6] == "3B0"
    assert computations(its.pipeline_order)[1][6] == "3B2"


@pytest.mark.parametrize(
    ("name", "order"), [("zbh1", "zb-h1"), ("ZB-H1", "zb-h1"), ("v_half", "v-half"), ("Hanayo", "hanayo")]
)
def test_pipeflows_names_are_classes_too(ours: Any, name: str, order: str) -> None:
    kind = ours.get_schedule_class(name)
    assert kind is ours.get_schedule_class(order)
    rows = made(kind, ours.PipelineScheduleMulti, 2, 4).schedule.rows
    assert rows == make_schedule(order, ranks=2, microbatches=4).rows


def test_unknown_names_and_schedules_of_two_directions(ours: Any) -> None:
    with pytest.raises(UsageError, match="did you mean '1F1B'"):
        ours.get_schedule_class("1F1")
    with pytest.raises(UsageError, match="'chimera' does not run 2 stages on 2 ranks, each stage on one of them"):
        made(ours.get_schedule_class("chimera"), ours.PipelineScheduleMulti, 2, 4)


@pytest.mark.parametrize("name", ["LoopedBFS", "zb-h1"])
def test_torchs_visualizer_takes_every_name(ours: Any, name: str) -> None:
    from pipeflow.pipelining._schedule_visualizer import get_schedule_ops, visualize_schedule

    order = made(ours.get_schedule_class(name), ours.PipelineScheduleMulti, 2, 4).pipeline_order
    assert get_schedule_ops(name, 2, 4) == [order[0], order[1]]
    assert callable(visualize_schedule)


@pytest.mark.parametrize("form", ["compute_only", "compute_comms"])
def test_a_file_goes_round(ours: Any, form: str, tmp_path: Path) -> None:
    source = made(ours.ScheduleZBVZeroBubble, ours.PipelineScheduleMulti, 2, 4)
    source._dump_csv(str(tmp_path / "order.csv"), format=form)
    runtime = made(ours._PipelineScheduleRuntime, ours.PipelineScheduleMulti, 2, 4)
    with pytest.raises(UsageError, match="_PipelineScheduleRuntime has no order yet: set pipeline_order, or load one"):
        _ = runtime.schedule
    runtime._load_csv(str(tmp_path / "order.csv"), format=form)
    assert runtime.schedule.rows == source.schedule.rows


@pytest.mark.exhaustive
def test_an_order_that_cannot_run_is_refused_before_it_does(ours: Any) -> None:
    runtime = made(ours._PipelineScheduleRuntime, ours.PipelineScheduleMulti, 1, 1)
    runtime._prepare_schedule_with_comms(
        {0: [ours._Action.from_str(text) for text in ("1F0", "0F0", "0B0", "1B0")]}, format="compute_comms"
    )
    assert verify(runtime.schedule)


@pytest.mark.exhaustive
def test_torchs_other_modules_have_their_names(ours: Any) -> None:
    import pipeflow.pipelining
    from pipeflow.pipelining._backward import stage_backward_input
    from pipeflow.pipelining._IR import Pipe
    from pipeflow.pipelining.microbatch import TensorChunkSpec
    from pipeflow.pipelining.stage import _PipelineStageBase

    assert Pipe is pipeflow.pipelining.Pipe
    assert all(callable(each) for each in (stage_backward_input, TensorChunkSpec, _PipelineStageBase, ours._Action))
