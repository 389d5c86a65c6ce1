"""The scripts of transformers: few of their lines are about a pipeline; without them they are transformers' own."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.examples.conftest import EXAMPLES, write_text
from tests.scripts import run_ranks

demo = pytest.importorskip("huggingface.demo", reason="transformers is not installed", exc_type=ImportError)
FOLDER = EXAMPLES / "huggingface"
SCRIPTS = ["bert.py", "llama.py", "own_loss.py"]


@pytest.mark.parametrize("name", SCRIPTS)
def test_few_lines_are_about_parallelism(name: str) -> None:
    lines = (FOLDER / name).read_text(encoding="utf-8").splitlines()
    about = [line for line in lines if line.endswith("# parallel")]
    assert len(lines) < 40
    assert 0 < len(about) <= 8
    code = "\n".join(lines).split('"""', 2)[2].splitlines()
    assert [line for line in code if re.search(r"pipeflow|schedule\b|example\b|Pipeline|pipelined", line)] == about


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore")
def test_the_demo_trains_as_transformers_does(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its ranks are forked, and not started."""
    text = tmp_path / "text.jsonl"
    write_text(text, [f"document {number} counts {number} " * 60 for number in range(60)])

    def start_ranks(ranks: int) -> None:
        options = sys.argv[1:]
        sys.stdout.write(run_ranks(demo.SCRIPT, *options, ranks=ranks, DATA=str(text), TRANSFORMERS_VERBOSITY="error"))

    monkeypatch.setattr(demo, "start_ranks", start_ranks)
    monkeypatch.setattr(sys, "argv", ["demo.py", "--check", "--steps", "4"])
    monkeypatch.setenv("DATA", str(text))
    demo.main()
    printed = capsys.readouterr().out
    assert re.search(r"^4 losses, which differ by \d.\de-0[5-9] at most$", printed, re.MULTILINE)
    losses = [float(loss) for loss in re.findall(r"{'loss': '([\d.]+)'", printed)]
    assert losses[:4] == losses[4:]
    assert losses[3] < losses[0]


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore")
def test_a_trainer_with_its_own_loss_trains_as_on_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = FOLDER / "own_loss.py"
    options = "--max_steps 20 --logging_steps 1 --learning_rate 3e-3 --use_cpu --disable_tqdm 1 --report_to none"
    options += " --save_strategy no --dataloader_pin_memory 0 --per_device_train_batch_size 8 --output_dir "
    run_ranks(script, *(options + str(tmp_path / "pipeline")).split(), ranks=2, TRANSFORMERS_VERBOSITY="error")
    monkeypatch.setattr(sys, "argv", [str(script), *(options + str(tmp_path / "alone")).split()])
    plain = demo.without_parallel_lines(script.read_text(encoding="utf-8"))
    exec(compile(plain, str(script), "exec"), {"__name__": "__main__"})
    losses, alone = (demo.losses_in(tmp_path / name) for name in ("pipeline", "alone"))
    assert len(losses) == 20
    assert losses == pytest.approx(alone, abs=1e-5)
    assert losses[-1] < losses[0] / 2
