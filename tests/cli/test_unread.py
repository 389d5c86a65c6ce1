"""Options that a mode of a command does not read: none is ignored without a word."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from pipeflow.core.analysis.simulation import simulate
from pipeflow.schedules import make_schedule
from pipeflow.tools.cli import main
from pipeflow.tools.cli.command import parser
from tests.cli.run import error, out

VALUES = {"costs": "costs.json", "placement": "vee", "unit": "ms", "svg": "-", "names": "x", "memory": "40GiB"}
MODES = {  # what is given beside each option of a command, and the options that may leave the output as it is
    "draw 1f1b": (),
    "draw 1f1b --perfetto -": (),
    "simulate 1f1b --json": (),
    "simulate run.json": (),
    "verify 1f1b": ("--extra-warmup", "--reduce", "--optimizer"),  # with them it is another schedule, which is sound
    "verify run.json": (),
    "diff plan.json plan.json": (),
    "explain run.json": (),
    "explain run.json --json": (),
    "plan --measured run.json": (),
}


@pytest.fixture
def files(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    schedule = make_schedule("1f1b", ranks=4, microbatches=8)
    Path("run.json").write_text(simulate(schedule).to_json(), encoding="utf-8")
    Path("plan.json").write_text(out(capsys, "plan", "gpt2-small", "--device", "h100-80gb", "--json"), encoding="utf-8")
    one = ",".join("1" * 4)
    Path("costs.json").write_text(
        f'{{"forward": [1, 2, 1, 1], "backward_input": [{one}], "backward_weight": [{one}]}}', encoding="utf-8"
    )


@pytest.mark.slow
@pytest.mark.usefixtures("files")
@pytest.mark.parametrize("mode", MODES)
def test_each_option_changes_the_output_or_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, mode: str
) -> None:
    words = mode.split()
    commands = next(each for each in parser(words[0])._actions if isinstance(each, argparse._SubParsersAction))
    assert main(words) == 0
    usual, ignored = capsys.readouterr().out, []
    options = (action for action in commands.choices[words[0]]._actions if action.option_strings)
    for action in options:
        typed = action.option_strings[-1]
        if typed == "--help" or typed in (*words, *MODES[mode]):
            continue
        value = VALUES.get(action.dest, [*(action.choices or "2")][-1])
        status = main([*words, typed, *[str(value)] * (action.nargs != 0)])
        unchanged = status == 0 and capsys.readouterr().out == usual
        if unchanged and not (tmp_path / "2").exists():  # the file that it writes
            ignored.append(typed)
        (tmp_path / "2").unlink(missing_ok=True)
    assert ignored == []


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ("plan gpt2-small --csv f.csv", "--csv is not read without --measured: leave it out"),
        (
            "plan gpt2-small --measured run.json --devices 64 --breakdown --cut cost",
            "MODEL, --cut, --devices and --breakdown are not read with --measured, which has no model",
        ),
        ("plan gpt2-small --device h100-80gb --for megatron --breakdown", "--breakdown is not read with --for"),
        ("plan gpt2-small --prefetch --zero 2", "--prefetch is not read without --zero 3"),
        ("plan gpt2-small --context-kind ring", "--context-kind is not read without --context"),
        ("plan gpt2-small --early-stop", "is not read without --checkpoint: leave it out"),
        ("plan gpt2-small --expert-tensor 2", "--expert-tensor is not read by gpt2-small, which has no experts"),
        ("draw 1f1b --recompute-stages 3-1", "--recompute-stages: the stages 3-1 go down: write 1-3"),
        ("draw 1f1b --offload 2", "--offload is not read by 1f1b, without offloads or loads: leave it out"),
        ("draw 1f1b --overlap 0.5", "--overlap is not read by 1f1b, without pairs of a forward and a backward"),
        ("draw zb-h1 --deferred-bytes 2", "--deferred-bytes is not read without --saved-bytes"),
        ("draw 1f1b --forward-only --backward-input 2", "by 1f1b (forward only), without backwards or input gradients"),
        ("draw 1f1b --no-memory --svg -", "--no-memory is not read for files, which always show it"),
        ("compare 1f1b gpipe --reshard 2", "--reshard is not read by 1f1b or gpipe, without reshards"),
        ("compare 1f1b gpipe --svg - --sort name", "--sort is not read for --svg, which has no order"),
        ("export 1f1b --csv - --costs costs.json", "--costs does not change the order of 1f1b: leave it out"),
        ("draw 1f1b --unit \x1b[31m", "argument --unit: it must be a name without control characters"),
        ("check a b -- --layers 2", "arguments after -- are for scripts: name a file that ends with .py"),
        ("check train.py --ranks 2 --steps 0", "--steps must be at least 1, got 0"),
    ],
)
def test_what_is_not_read_is_said(capsys: pytest.CaptureFixture[str], argv: str, said: str) -> None:
    assert said in error(capsys, *argv.split())


@pytest.mark.parametrize(
    "argv",
    [
        "draw 1f1b --offload-stages all --offload 0.1",
        "simulate 1f1b --unshard-stages all --reshard 0.1 --saved-bytes 4 --whole-weights-bytes 9",
        "simulate zb-h1 --saved-bytes 4 --deferred-bytes 2",
        "compare 1f1b zb-h1 --saved-bytes 4 --deferred-bytes 2",
        "export 1f1b --csv - --reduce 1",
        "export zb-auto --csv - --forward 2",
        "plan gpt2-small --prefetch --zero 3 --data 2",
    ],
)
def test_what_is_read_is_taken(capsys: pytest.CaptureFixture[str], argv: str) -> None:
    assert out(capsys, *argv.split())
