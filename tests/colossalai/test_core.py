"""The tutorial's questions, answered from the layout."""

from __future__ import annotations

from typing import Any

import pytest

from pipeflow import UsageError
from pipeflow.colossalai.context import ParallelMode
from pipeflow.colossalai.core import global_context as gpc
from pipeflow.engine.parallel.context import current_context
from pipeflow.testing import run_threads


def groups() -> dict[str, Any]:
    return {mode.name: (gpc.get_ranks_in_group(mode), gpc.get_local_rank(mode)) for mode in ParallelMode}


def test_groups_of_every_rank() -> None:
    told = run_threads(groups, 8, tensor=2, data=2)
    assert told[5] == {
        "GLOBAL": (list(range(8)), 5),
        "DATA": ([1, 5], 1),
        "PIPELINE": ([5, 7], 0),
        "TENSOR": ([4, 5], 1),
        "MODEL": ([4, 5, 6, 7], 1),
    }
    for rank, one in enumerate(told):
        for ranks, local in one.values():
            assert ranks[local] == rank


def ends() -> tuple[Any, ...]:
    mode = ParallelMode.PARALLEL_1D
    assert mode is ParallelMode.TENSOR
    assert (gpc.pipeline_parallel_size, gpc.tensor_parallel_size, gpc.data_parallel_size) == (3, 2, 1)
    assert [gpc.get_world_size(mode) for mode in ParallelMode] == [6, 1, 3, 2, 6]
    return gpc.is_pipeline_first_stage(), gpc.is_pipeline_last_stage(), gpc.is_first_rank(mode), gpc.is_last_rank(mode)


def test_first_and_last() -> None:
    told = run_threads(ends, 6, tensor=2)
    assert told[1] == (True, False, False, True)
    assert told[2] == (False, False, True, False)
    assert told[5] == (False, True, False, True)


def destroy() -> None:
    assert gpc.is_initialized(ParallelMode.DATA)
    assert gpc.config is None
    gpc.load_config(current_context().rank)
    assert gpc.config == current_context().rank  # each rank's own, though they are threads
    gpc.destroy()
    gpc.destroy()
    assert not gpc.is_initialized(ParallelMode.DATA)
    assert gpc.config is None


def test_it_has_no_state_of_its_own() -> None:
    run_threads(destroy, 3)
    with pytest.raises(UsageError, match="there is no context"):
        gpc.get_global_rank()
