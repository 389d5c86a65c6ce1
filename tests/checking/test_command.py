"""`pipeflow check`: its status, its outputs, and both runs of a script."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from pipeflow.tools.cli import main
from tests.checking.jobs import train
from tests.cli.run import error, out


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("runs")
    train(folder / "plain", steps=1)
    train(folder / "four", steps=1, microbatches=4)
    train(folder / "wrong", steps=1, fault=("scale", {"name": "blocks.1.up", "factor": 4.0}))
    return {name: str(folder / name) for name in ("plain", "four", "wrong")}


def test_runs_that_are_alike(runs: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    said = out(capsys, "check", runs["plain"], runs["four"])
    assert said.startswith("The runs are alike: 1 batches, ")
    told = json.loads(out(capsys, "check", runs["plain"], runs["four"], "--json"))
    assert (told["alike"], told["first"], told["cause"]) == (True, None, None)


def test_runs_that_differ(runs: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.html"
    assert main(["check", runs["plain"], runs["wrong"], "--html", str(page)]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "The gradient of blocks.1.up.bias (rank 0) is the first to differ" in said
    assert "of the terms that it adds up, where rounding explains" in said
    assert re.search(r"the likely cause is scale\. .*?\. 2 of \d+ gradients are 4 times the reference's", said)
    text = page.read_text(encoding="utf-8")
    assert "<script" not in text
    HTMLParser().feed(text)
    assert re.findall(r"class='leaf wrong first'><code>(\w+)", text) == ["up"]
    assert main(["check", runs["plain"], runs["wrong"], "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["first"]["module"] == "blocks.1.up"


def test_a_tolerance_of_ones_own(runs: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    out(capsys, "check", runs["plain"], runs["wrong"], "--tolerance", "10")
    assert "must be above 0" in error(capsys, "check", runs["plain"], runs["four"], "--tolerance", "0")


def test_arguments_that_cannot_work(runs: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "name two recordings" in error(capsys, "check", runs["plain"])
    assert "--ranks is for scripts" in error(capsys, "check", runs["plain"], runs["four"], "--ranks", "2")
    assert "--ranks is missing" in error(capsys, "check", str(tmp_path / "train.py"))
    assert "is no script" in error(capsys, "check", str(tmp_path / "train.py"), "--ranks", "2")
    (tmp_path / "train.py").write_text("", encoding="utf-8")
    for option, wrong, said in (
        ("--deadline", "0", "must be above 0 seconds, got 0"),
        ("--plain", "'", "--plain cannot be divided into arguments: No closing quotation"),
        ("--ranks", "1000000000", "are too many for one machine: at most 256"),
    ):
        assert said in error(capsys, "check", str(tmp_path / "train.py"), "--ranks", "2", option, wrong)
    assert "has no recording" in error(capsys, "check", runs["plain"], str(tmp_path))


SCRIPT = """
import sys, pipeflow, torch
from torch import nn
context = pipeflow.launch(pipeline=2)
torch.manual_seed(0)
module = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
batch = torch.randn(8, 4), torch.randn(8, 1)
schedule = pipeflow.make_schedule("1f1b", ranks=context.pipeline_size, microbatches=4)
model = pipeflow.Pipeline.from_module(module, schedule, batch, criterion=nn.MSELoss())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
while True:  # `check` ends it
    optimizer.zero_grad()
    pipeflow.execute_pipeline(iter([batch]), model)
    if "wrong" in sys.argv:
        for parameter in model.parameters():
            parameter.grad *= 4
    optimizer.step()
"""


@pytest.mark.exhaustive
def test_both_runs_of_a_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT, encoding="utf-8")
    assert out(capsys, "check", str(script), "--ranks", "2", "--schedule", "zb-h1").startswith(
        "The runs are alike: 2 batches"
    )
    assert main(["check", str(script), "--ranks", "2", "--plain", "right", "--", "wrong"]) == 1
    said = " ".join(capsys.readouterr().out.split()).lower()
    assert "all gradients are 4 times" in said
    assert re.search(r"\d+ of \d+ elements are wrong", said)  # of a second run, which records the first wrong one whole
    script.write_text("raise RuntimeError('mine')", encoding="utf-8")
    assert "the script failed in one process: RuntimeError: mine" in error_after_progress(capsys, script)
    script.write_text(
        "import os, sys\nif os.environ['WORLD_SIZE'] == '2':\n    sys.exit('train.py: no')\n" + SCRIPT, encoding="utf-8"
    )
    said = error_after_progress(capsys, script)
    assert re.search("the script failed on several ranks: rank [01]: train.py: no", said)
    script.write_text("", encoding="utf-8")
    assert "trained no module in one process" in error_after_progress(capsys, script)


def error_after_progress(capsys: pytest.CaptureFixture[str], script: Path) -> str:
    capsys.readouterr()
    assert main(["check", str(script), "--ranks", "2"]) == 2
    return capsys.readouterr().err


LOOP = """
import sys, torch
import torch.distributed as dist
from torch import nn
dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
class Both(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 1)
    def loss(self, inputs, labels):  # calls its parts, and is not called itself
        return nn.functional.mse_loss(self.second(self.first(inputs)), labels)
model = Both()
inputs, labels = torch.randn(8, 4).chunk(ranks)[rank], torch.randn(8, 1).chunk(ranks)[rank]
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
while True:  # `check` ends it
    optimizer.zero_grad()
    model.loss(inputs, labels).backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= 1 if "wrong" in sys.argv else ranks
    optimizer.step()
"""


@pytest.mark.exhaustive
def test_a_loop_of_ones_own_and_another_plain_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script, plain = tmp_path / "train.py", tmp_path / "plain.py"
    script.write_text(LOOP, encoding="utf-8")
    plain.write_text("ranks = 1\n" + LOOP, encoding="utf-8")
    said = out(capsys, "check", str(script), "--ranks", "2", "--plain", str(plain))
    assert said.startswith("The runs are alike: 2 batches, 4 weights, 4 outputs")
    assert main(["check", str(script), "--ranks", "2", "--plain", "", "--", "wrong"]) == 1
    assert "all gradients are 2 times" in " ".join(capsys.readouterr().out.split()).lower()
