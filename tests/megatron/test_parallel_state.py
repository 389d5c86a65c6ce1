"""How processes are laid out under Megatron-LM's names: every question, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from pipeflow.core.errors import UsageError
from pipeflow.engine.parallel.context import keep
from pipeflow.engine.parallel.launcher import launch
from pipeflow.megatron import parallel_state
from pipeflow.tensor import current_tracker
from pipeflow.testing import run_threads


def initialize(tensor: int, pipeline: int, *more: Any) -> None:
    """On ranks that were launched."""
    parallel_state.initialize_model_parallel(tensor, pipeline, *more)


def test_every_rank_knows_its_place() -> None:
    def place() -> Any:
        initialize(2, 2)
        assert parallel_state.is_initialized()
        assert parallel_state.model_parallel_is_initialized()
        sizes = (
            parallel_state.get_tensor_model_parallel_world_size(),
            parallel_state.get_pipeline_model_parallel_world_size(),
            parallel_state.get_data_parallel_world_size(),
        )
        assert sizes == (2, 2, 2)
        assert parallel_state.get_virtual_pipeline_model_parallel_world_size() is None
        return (
            parallel_state.get_tensor_model_parallel_rank(),
            parallel_state.get_pipeline_model_parallel_rank(),
            parallel_state.get_data_parallel_rank(),
            parallel_state.is_pipeline_first_stage(),
            parallel_state.is_pipeline_last_stage(),
            parallel_state.get_tensor_model_parallel_src_rank(),
            parallel_state.get_pipeline_model_parallel_first_rank(),
            parallel_state.get_pipeline_model_parallel_last_rank(),
        )

    found = run_threads(place, 8, tensor=2, data=2)
    assert found[1] == (1, 0, 0, True, False, 0, 1, 3)
    assert found[6] == (0, 1, 1, False, True, 6, 4, 6)


def test_stages_of_a_rank_are_first_or_last_of_all() -> None:
    def ends() -> Any:
        initialize(1, 2, 2)
        assert parallel_state.get_virtual_pipeline_model_parallel_world_size() == 2
        assert parallel_state.get_virtual_pipeline_model_parallel_rank() is None
        found = []
        for chunk in range(2):
            parallel_state.set_virtual_pipeline_model_parallel_rank(chunk)
            assert parallel_state.get_virtual_pipeline_model_parallel_rank() == chunk
            found.append((parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()))
        assert parallel_state.is_pipeline_first_stage(vp_stage=0) is found[0][0]
        rank = parallel_state.is_pipeline_first_stage(ignore_virtual=True), parallel_state.is_pipeline_last_stage(True)
        return rank, found

    first, last = run_threads(ends, 2)
    assert first == ((True, False), [(True, False), (False, False)])
    assert last == ((False, True), [(False, False), (False, True)])


def test_dropout_is_seeded_and_a_seed_that_is_there_stays() -> None:
    def seeded() -> None:
        assert current_tracker() is None
        initialize(1, 1)
        tracker = current_tracker()
        assert tracker is not None
        keep(parallel_state._KEY, None)
        initialize(1, 1)
        assert current_tracker() is tracker

    run_threads(seeded, 1)


def test_what_does_not_fit_is_refused() -> None:
    def refused() -> None:
        with pytest.raises(UsageError, match="launched as 1 replicas of 2 pipeline ranks with 1 tensor ranks"):
            initialize(2, 1)
        with pytest.raises(UsageError, match=r"virtual_pipeline_model_parallel_size must be at least 1, .* got 0 in"):
            initialize(1, 2, 0)
        with pytest.raises(UsageError, match=r"in a pipeline of at least 2 ranks; got .* in a pipe"):
            initialize(2, 1, 2)
        with pytest.raises(UsageError, match="context parallelism is not supported here: its size must be 1, got 2"):
            parallel_state.initialize_model_parallel(1, 2, context_parallel_size=2)
        with pytest.raises(UsageError, match="expert model parallelism is not supported here"):
            parallel_state.initialize_model_parallel(1, 2, expert_model_parallel_size=2)
        with pytest.raises(UsageError, match="order must have tp, pp and dp in this order"):
            parallel_state.initialize_model_parallel(1, 2, order="tp-cp-ep-dp-pp")
        initialize(1, 2)
        with pytest.raises(UsageError, match="initialized already: call destroy_model_parallel"):
            initialize(1, 2)

    run_threads(refused, 2)


def test_a_process_alone_may_begin_and_end_as_often_as_it_likes() -> None:
    for _ in range(2):
        parallel_state.destroy_model_parallel()
        assert not parallel_state.is_initialized()
        with pytest.raises(UsageError, match=r"call initialize_model_parallel\(tensor, pipeline\) first"):
            parallel_state.get_data_parallel_rank()
        parallel_state.initialize_model_parallel()
        assert parallel_state.get_data_parallel_world_size() == 1
        assert parallel_state.get_virtual_pipeline_model_parallel_world_size() is None
        parallel_state.destroy_model_parallel()
    parallel_state.destroy_model_parallel()


def test_what_pipeflow_launched_counts() -> None:
    launch(1, 1)
    assert parallel_state.is_initialized()
    assert parallel_state.get_virtual_pipeline_model_parallel_world_size() is None
    parallel_state.destroy_model_parallel()
    assert not parallel_state.is_initialized()
