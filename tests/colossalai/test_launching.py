"""The tutorial's lines run, with other imports alone."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from pipeflow import UsageError
from pipeflow.colossalai import get_default_parser, launch, launch_from_openmpi, launch_from_slurm, launch_from_torch
from pipeflow.colossalai.processes import lay_out, with_variables
from pipeflow.engine.parallel.context import Context
from pipeflow.testing import run_threads
from pipeflow.testing.ranks import free_port
from pipeflow.training import read_config
from tests.scripts import run_ranks

TUTORIAL = """
import os, sys
import torch
from torch.utils.data import TensorDataset

import pipeflow.colossalai as colossalai
import pipeflow.training as utils
from pipeflow.colossalai.amp import AMP_TYPE
from pipeflow.colossalai.context import ParallelMode
from pipeflow.colossalai.core import global_context as gpc
from pipeflow.colossalai.logging import disable_existing_loggers, get_dist_logger

BATCH_SIZE = 4
CONFIG = dict(
    NUM_MICRO_BATCHES=2,
    parallel=dict(pipeline=2, tensor=dict(mode='1d', size=1)),
    fp16=dict(mode=AMP_TYPE.NAIVE),
    LOG_PATH=sys.argv.pop(),
)


def train():
    disable_existing_loggers()
    parser = colossalai.get_default_parser()
    args = parser.parse_args()
    colossalai.launch_from_torch(config=CONFIG, backend=args.backend)
    logger = get_dist_logger()

    train_ds = TensorDataset(torch.arange(16), torch.arange(16))
    train_dataloader = utils.get_dataloader(train_ds,
                                            seed=42,
                                            batch_size=BATCH_SIZE,
                                            pin_memory=True,
                                            shuffle=True,
                                            drop_last=True)
    global_batch_size = BATCH_SIZE * \\
        gpc.get_world_size(ParallelMode.DATA) * getattr(gpc.config, "gradient_accumulation", 1)
    logger.info(f'Init done, global batch size = {global_batch_size}', ranks=[0])
    logger.info(f'Rank{gpc.get_global_rank()} of stage {gpc.get_local_rank(ParallelMode.PIPELINE)}')
    logger.info(f'{torch.initial_seed()} {[inputs.tolist() for inputs, _ in train_dataloader]}')
    assert gpc.config.fp16.mode is AMP_TYPE.NAIVE


train()
"""


def said(file: Path) -> list[str]:
    return [line.partition(" pipeflow: ")[2] for line in file.read_text(encoding="utf-8").splitlines()]


@pytest.mark.slow
def test_the_tutorial_runs(tmp_path: Path) -> None:
    script, logs = tmp_path / "train.py", tmp_path / "logs"
    script.write_text(TUTORIAL, encoding="utf-8")
    run_ranks(script, "--backend", "gloo", str(logs), ranks=2, folder=tmp_path)
    first, second = (said(logs / f"rank_{rank}.log") for rank in range(2))
    assert first[0] == "2 ranks: data 1 x pipeline 2 x tensor 1, on cpu"
    assert first[1:3] == ["Init done, global batch size = 4", "Rank0 of stage 0"]
    assert second[0] == "Rank1 of stage 1"
    (seed, _, read), (other, _, same) = (lines[-1].partition(" ") for lines in (first, second))
    assert read == same
    assert (int(seed), int(other)) == (1024, 2048)


LAUNCH = """
import os, sys
import torch
import pipeflow.colossalai
from pipeflow.colossalai.context import ParallelMode
from pipeflow.colossalai.core import global_context as gpc
rank, port = int(os.environ["RANK"]), int(sys.argv[1])
for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
    del os.environ[name]
context = pipeflow.colossalai.launch({"parallel": {"tensor": 2}}, rank, 2, "127.0.0.1", port, verbose=False)
total = torch.ones(1) * (rank + 1)
context.tensor.all_reduce(total).wait()
print(gpc.get_local_rank(ParallelMode.TENSOR), int(total), flush=True)
"""


@pytest.mark.exhaustive
def test_without_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "launch.py"
    script.write_text(LAUNCH, encoding="utf-8")
    assert run_ranks(script, str(free_port()), ranks=2, folder=tmp_path) == "0 3\n1 3\n"


@pytest.mark.parametrize("form", ["old", "places", "names"])
def test_a_launch_needs_no_configuration(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    monkeypatch.setattr("pipeflow.colossalai.processes.launch_from_torch", lambda *given, **named: told.append(given))
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")
    if form == "old":
        launch("c.py", 1, 2, "host", 29500, "gloo", seed=3)
    elif form == "places":
        launch(1, 2, "host", 29500, "gloo", seed=3)
    else:
        launch(rank=1, world_size=2, host="host", port=29500, backend="gloo", seed=3)
    assert told == [("c.py" if form == "old" else None, "gloo", 3, True)]
    where = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    assert [os.environ[name] for name in where] == ["1", "2", "0", "host", "29500"]


def test_a_launch_names_what_is_missing() -> None:
    with pytest.raises(TypeError, match=r"launch\(\) missing 3 required positional arguments: 'world_size', 'host'"):
        launch(rank=0)
    with pytest.raises(TypeError, match=r"launch\(\) missing 2 required positional arguments: 'host' and 'port'"):
        launch(0, 1)  # without a configuration


def test_the_parsers_options() -> None:
    parser = get_default_parser()
    where = ["--config", "c.py", "--host", "h", "--port", "1", "--backend", "gloo"]
    who = ["--world_size", "2", "--rank", "1", "--local_rank", "0"]
    assert vars(parser.parse_args([*where, *who])) == {
        "config": "c.py",
        "host": "h",
        "port": 1,
        "world_size": 2,
        "rank": 1,
        "local_rank": 0,
        "backend": "gloo",
    }
    assert set(vars(parser.parse_args([])).values()) == {None}


@pytest.mark.parametrize(("backend", "message"), [("mpi", "backend 'mpi' is not supported"), ("nccl", "needs a GPU")])
def test_backends_that_are_not_there(backend: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(UsageError, match=message):
        launch_from_torch({}, backend=backend)


LAUNCHERS: list[tuple[Callable[..., Context], list[str]]] = [
    (launch_from_slurm, ["SLURM_PROCID", "SLURM_NPROCS", "SLURM_LOCALID"]),
    (launch_from_openmpi, ["OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"]),
]


@pytest.mark.parametrize(("launcher", "names"), LAUNCHERS, ids=["slurm", "openmpi"])
def test_other_launchers_say_where_a_process_is(
    launcher: Callable[..., Context], names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Any] = []
    monkeypatch.setattr("pipeflow.colossalai.processes.launch", lambda *given, **named: told.append((given, named)))
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    for missing, value in zip(names, ("5", "8", "1"), strict=True):
        with pytest.raises(UsageError, match=f"environment variable {missing} is not a number: start the program with"):
            launcher({}, "host", 29500)
        monkeypatch.setenv(missing, value)
    launcher({}, "host", 29500, backend="gloo", seed=3)
    launcher("c.py", host="host", port=29500, backend="gloo", seed=3)
    launcher("host", 29500, "gloo", seed=3)
    launcher(host="host", port=29500, backend="gloo", seed=3)
    assert [given for given, _ in told] == [(5, 8, "host", 29500, "gloo", 1)] * 4
    assert [named for _, named in told] == [
        {"config": {}, "seed": 3},
        {"config": "c.py", "seed": 3},
        *[{"seed": 3}] * 2,
    ]


def test_a_script_may_keep_settings_beside_its_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the tutorials do; what the configuration itself says is meant."""
    script = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", script)
    assert with_variables({"SEED": 1}) == {"SEED": 1}
    vars(script).update(TENSOR_SHAPE=(2, 3), NUM_CHUNKS=None)
    assert with_variables({"SEED": 1}) == {"SEED": 1, "TENSOR_SHAPE": (2, 3)}
    vars(script).update(TENSOR_SHAPE=lambda: None, NUM_CHUNKS=2)
    assert with_variables({}) == {"NUM_CHUNKS": 2}
    for config in ({"NUM_CHUNKS": 3}, {"model": {"num_chunks": 3}}):
        assert with_variables(config) == config
    assert with_variables("config.py") == "config.py"

    assert read_config(with_variables({"NUM_MICRO_BATCHES": 2})).num_chunks == 2


@pytest.mark.parametrize("name", ["context", "experts"])
def test_other_sizes_drop_no_ranks(name: str) -> None:
    def ask() -> None:
        with pytest.raises(UsageError, match=f"launched with {name}=2 and other pipeline or tensor sizes"):
            lay_out(1, 1)

    sizes: dict[str, Any] = {name: 2, "data": 2 if name == "experts" else 1}
    run_threads(ask, 4, **sizes)
