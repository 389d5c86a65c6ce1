"""A script that was written for ColossalAI runs as it stands."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pipeflow.colossalai.__main__ import WithoutGpu, main

ROOT = Path(__file__).resolve().parents[2]

SCRIPT = """
import os
import sys

import colossalai
import colossalai.utils as utils
import model_zoo.gpt.gpt as col_gpt
from colossalai import nn as col_nn
from colossalai.context import ParallelMode
from colossalai.core import global_context as gpc
from colossalai.logging import disable_existing_loggers, get_dist_logger
from colossalai.registry import LAYERS
from colossalai.utils.timer import MultiTimer
from model import WIDTH  # a package of the script's own

@LAYERS.register_module
class Block(col_nn.LayerNorm):
    pass

if __name__ == "__main__":
    args = colossalai.get_default_parser().parse_args()
    colossalai.launch_from_torch(config=dict(parallel=dict(pipeline=1, tensor=dict(mode="1d", size=2))),
                                 backend=args.backend, verbose=False)

    import pipeflow.colossalai.core
    import pipeflow.colossalai.nn.layer.wrapper
    import colossalai.nn.layer.wrapper
    from colossalai.nn.layer import wrapper
    assert pipeflow.colossalai is colossalai
    assert pipeflow.colossalai.core.global_context is gpc
    assert pipeflow.colossalai.nn.layer.wrapper is wrapper is sys.modules["colossalai.nn.layer.wrapper"]
    assert wrapper.__spec__.name == wrapper.__name__ == "pipeflow.colossalai.nn.layer.wrapper"
    assert isinstance(LAYERS.get_module("Block")(WIDTH), pipeflow.colossalai.nn.LayerNorm)
    assert col_gpt.GPTBlock
    assert utils.MultiTimer is MultiTimer
    try:
        import colossalai.nowhere
    except ModuleNotFoundError as error:
        line = f"{str(error).partition(';')[0]} {sys.argv[1:]} {gpc.get_local_rank(ParallelMode.TENSOR)}\\n"
        os.write(1, line.encode())  # in one piece: another rank writes, too
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "__init__.py").write_text("WIDTH = 4\n", encoding="utf-8")
    file = tmp_path / "train.py"
    file.write_text(SCRIPT, encoding="utf-8")
    return file


@pytest.mark.exhaustive
def test_a_script_runs_under_torchrun(script: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, "-m", "pipeflow.colossalai", str(script), "--backend", "gloo"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    said = "pipeflow.colossalai has no 'nowhere' ['--backend', 'gloo']"
    assert sorted(done.stdout.splitlines()) == [f"{said} 0", f"{said} 1"]


def test_what_is_no_script_is_one_clear_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([str(tmp_path / "nowhere.py")])
    assert f"there is no file '{tmp_path / 'nowhere.py'}'" in capsys.readouterr().err


def test_cuda_is_the_cpu_without_a_gpu() -> None:
    with WithoutGpu():
        module = torch.nn.Linear(2, 2).to(torch.device("cuda")).cuda()
        made = [torch.zeros(1, device="cuda:1"), torch.ones(1).to("cuda", torch.float64), torch.ones(1).cuda()]
        meta = torch.ones(1, device="meta")
    assert {each.device.type for each in (*made, *module.parameters())} == {"cpu"}
    assert made[1].dtype == torch.float64
    assert meta.device.type == "meta"
