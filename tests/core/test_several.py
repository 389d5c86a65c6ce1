"""One name, path or number where several are taken."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pipeflow import (
    MODELS,
    Cluster,
    CostModel,
    Explanation,
    Setup,
    UsageError,
    Wanted,
    explain,
    make_schedule,
    with_offload,
    with_recompute,
    with_unshard,
)
from pipeflow.core.schedule import Schedule

PLANNED = make_schedule("1f1b", ranks=2, microbatches=2)
COST = CostModel((1, 1), (1, 1), (1, 1), offload=(0.1, 0.1))
TRACES = Path(__file__).parents[2] / "docs" / "traces"
MEMORY: list[Callable[[object], Schedule]] = [
    lambda stages: with_recompute(PLANNED, stages),  # type: ignore[arg-type]
    lambda stages: with_unshard(PLANNED, stages),  # type: ignore[arg-type]
    lambda stages: with_offload(PLANNED, COST, stages),  # type: ignore[arg-type]
]


def test_one_alone_is_a_list_of_one() -> None:
    for traces in (str(TRACES), TRACES, [TRACES]):
        assert isinstance(found := explain(traces), Explanation)
        assert found.names == ("1f1b",)
    wanted = Wanted(MODELS["gpt2-small"], Cluster.of("h100-80gb"), 4, 8, schedules="1f1b")  # type: ignore[arg-type]
    assert wanted.schedules == ("1f1b",)
    setup = Setup(recompute_modules="mlp", cuda_graphs=["attn"])  # type: ignore[arg-type]
    assert (setup.recompute_modules, setup.cuda_graphs) == (("mlp",), ("attn",))
    for save in MEMORY:
        assert save(1) == save([1]) != save([0])


@pytest.mark.parametrize("save", MEMORY)
@pytest.mark.parametrize(("given", "wrong"), [("01", "'01'"), (["1"], "'1'"), ([1.0], "1.0"), (True, "True")])
def test_what_is_no_number_is_said(save: Callable[[object], Schedule], given: object, wrong: str) -> None:
    with pytest.raises(UsageError, match=f"stages must be a list of whole numbers, got {wrong}"):
        save(given)


def test_what_is_no_path_or_name_is_said() -> None:
    with pytest.raises(UsageError, match="paths must be a list of paths, got 3"):
        explain(3)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="cuda_graphs must be a list of names, got 1"):
        Setup(cuda_graphs=1)  # type: ignore[arg-type]
