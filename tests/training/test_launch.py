"""A launch as a configuration says: where ranks lie, what they draw, where they log; alone and under torchrun."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.scripts import run_ranks

DRAWS = """
import sys
import torch
import pipeflow
from pipeflow.engine.tensor.random import current_tracker
from pipeflow.training import get_dist_logger, launch_from_config

config = dict(parallel=dict(pipeline=2, tensor=dict(mode="1d", size=2)), seed=int(sys.argv[1]), LOG_PATH="logs")
context = launch_from_config(config, verbose=False)
tracker = current_tracker()
assert tracker is not None
draws = [torch.rand(1, generator=each).item() for each in (None, tracker.shared, tracker.own)]
logger = get_dist_logger()
logger.log_to_file("logs")
logger.info("once")
print(context.pipeline_rank, context.tensor_rank, *draws)
"""


@pytest.mark.slow
def test_the_seed_of_the_configuration_starts_every_stream(tmp_path: Path) -> None:
    """Python's and torch's generators, and those of dropout over tensor ranks; a log that is begun twice is one."""
    script = tmp_path / "draws.py"
    script.write_text(DRAWS, encoding="utf-8")
    told = []
    for seed in ("3", "3", "4"):
        lines = run_ranks(script, seed, ranks=4, folder=tmp_path).splitlines()
        words = [line.split() for line in lines if line.count(" ") == 4]  # without what is logged
        told.append({(int(stage), int(part)): draws for stage, part, *draws in words})
    first, again, other = told
    assert first == again
    for place, draws in first.items():
        assert not set(draws) & set(other[place])
    for stage in range(2):
        (default, shared, own), (same, alike, others) = first[stage, 0], first[stage, 1]
        assert (default, shared) == (same, alike)
        assert own != others
    assert not set(first[0, 0]) & set(first[1, 0])
    for rank in range(4):
        assert (tmp_path / "logs" / f"rank_{rank}.log").read_text(encoding="utf-8").count("once") == 3


ALONE = """
import torch.distributed as dist
import pipeflow
context = pipeflow.launch()
assert dist.get_world_size() == 1
assert context.mesh.shape == (1, 1, 1)
dist.barrier()
context.close()
context = pipeflow.launch()
assert context.mesh.mesh_dim_names == ("data", "pipeline", "tensor")
print("done")
"""


@pytest.mark.exhaustive
def test_a_world_of_one_under_torchrun_has_a_process_group(tmp_path: Path) -> None:
    script = tmp_path / "alone.py"
    script.write_text(ALONE, encoding="utf-8")
    assert run_ranks(script, ranks=1) == "done\n"
