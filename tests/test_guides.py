"""The scripts, snippets and commands of the guides run as they stand there, and say what the guides show."""

from __future__ import annotations

import doctest
import json
import re
import shlex
from collections.abc import Iterator
from copy import deepcopy
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import pipeflow
from benchmarks.__main__ import TIMED
from pipeflow.engine.parallel.context import current_context
from pipeflow.tensor import DEFAULT_RULES
from pipeflow.testing import run_threads
from pipeflow.tools.cli import main
from tests.cli.run import out
from tests.guides import ROOT, blocks, changed, commands, guide, section
from tests.scripts import run_ranks
from tests.sources import Fault, Source, documents, line_of, require

START, DEBUGGING, CHECKPOINTS = (guide(f"docs/{name}.md") for name in ("getting-started", "debugging", "checkpoints"))
STAGES, TRAINING, SIMULATING, EXPLAINING = (
    guide(f"docs/{name}.md") for name in ("stages", "training", "simulating", "explaining")
)
[FIRST], [RESUMING] = blocks(START, "python"), blocks(START, "diff")
[BY_HAND] = blocks(STAGES, "python", "import torch\n")
TRAINER, LENGTHS = blocks(TRAINING, "python", "import pipeflow\nimport torch")
[HYBRID] = blocks(TRAINING, "python", "from collections")
[STEPPING] = blocks(TRAINING, "python", "import torch\n")
OVER_CONTEXT, OVER_EXPERTS, IN_SLICES = blocks(guide("docs/clusters.md"), "python")
LOSSES = r"step (\d+): loss ([\d.]+)"
WIDTH = 100
GENERATED = {"docs/schedules.md", "docs/design.md"}  # by docs/gallery.py; a page for those who read the code


def losses_of(script: str, ranks: int, folder: Path) -> list[tuple[int, float]]:
    """What a script prints that so many processes run: steps and losses."""
    (folder / "train.py").write_text(script, encoding="utf-8")
    said = run_ranks(folder / "train.py", ranks=ranks, folder=folder)
    return [(int(step), float(loss)) for step, loss in re.findall(LOSSES, said)]


def shown(text: str) -> list[tuple[int, float]]:
    """The steps and losses that a guide shows."""
    return [(int(step), float(loss)) for step, loss in re.findall(LOSSES, text)]


def require_alike(losses: list[tuple[int, float]], expected: list[tuple[int, float]]) -> None:
    """Fails unless the losses are those shown, up to rounding, which differs between machines."""
    assert [step for step, _ in losses] == [step for step, _ in expected]
    assert [loss for _, loss in losses] == pytest.approx([loss for _, loss in expected], abs=2e-4)


def require_shown(capsys: pytest.CaptureFixture[str], console: list[tuple[str, str]]) -> None:
    """Fails unless each command prints what stands below it, or begins so."""
    for command, text in console:
        assert out(capsys, *shlex.split(command)[1:]).startswith(text.rstrip("\n"))


# Getting started


def test_the_first_schedules_are_the_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    part = section(START, "Draw a schedule")
    [table] = blocks(part, "csv")
    Path("mine.csv").write_text(table, encoding="utf-8")
    console = [each for block in blocks(part, "console") for each in commands(block)]
    assert [command.split()[1] for command, _ in console] == ["draw", "verify", "draw"]
    require_shown(capsys, console)


@pytest.mark.some(1)
@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 1])
def test_the_first_step_prints_what_is_shown(ranks: int, tmp_path: Path) -> None:
    losses = losses_of(FIRST, ranks, tmp_path)
    expected = shown(section(START, "Train a first step"))
    assert [step for step, _ in expected] == [0, 10, 20, 30]
    require_alike(losses, expected)


@pytest.mark.exhaustive
def test_the_first_checkpoint_is_resumed_as_is_shown(tmp_path: Path) -> None:
    script = changed(FIRST, RESUMING)
    console = section(START, "Save a first checkpoint")
    losses = losses_of(script, 2, tmp_path)
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["step-40"]
    losses += losses_of(script, 2, tmp_path)
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["step-40", "step-80"]
    require_alike(losses, shown(console))
    assert losses_of(script, 1, tmp_path)[0][0] == 80
    assert [printed for _, printed in commands(blocks(console, "console")[0])][1::2] == [
        "step-40\n",
        "step-40  step-80\n",
    ]


# Debugging

SNIPPETS = blocks(DEBUGGING, "python")
ANSWERED: list[tuple[str, str]] = re.findall(
    r"^```python\n((?:(?!```).*\n)+)```\n\n```text\n((?:(?!```).*\n)+)", DEBUGGING, re.MULTILINE
)
BEFORE = FIRST[: FIRST.index("for step in")]


def told(snippet: str, folder: Path) -> str:
    """What the ranks of a snippet print, with the error that it ends with, in one line."""
    indented = "".join(f"    {line}" for line in snippet.splitlines(keepends=True))
    tail = "except pipeflow.PipeflowError as error:\n    print(f'{type(error).__name__}: {error}')\n"
    (folder / "train.py").write_text(f"{BEFORE}\ntry:\n{indented}{tail}", encoding="utf-8")
    return " ".join(run_ranks(folder / "train.py", ranks=2, folder=folder).split())


@pytest.mark.exhaustive
@pytest.mark.parametrize(("snippet", "answer"), ANSWERED, ids=[answer.split(":")[0] for _, answer in ANSWERED])
def test_a_problem_is_told_as_is_shown(snippet: str, answer: str, tmp_path: Path) -> None:
    shown = re.split(r"\.\.\.|rank 0 was", answer)[0]  # what a rank did when another one died depends on the machine
    assert " ".join(shown.split()) in told(snippet, tmp_path)


@pytest.mark.exhaustive
def test_a_slow_stage_is_found_by_the_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    part = section(DEBUGGING, "A step is slow")
    slow = (
        "import time\nlayers = [each for each in model.modules() if isinstance(each, nn.Linear)]\n"
        "for each in layers if context.rank == 1 else []:\n"
        "    each.register_forward_hook(lambda *_: time.sleep(0.2))\n"
    )
    assert told(slow + blocks(part, "python")[0], tmp_path) == ""
    console = [each for block in blocks(part, "console") for each in commands(block)]
    draw, diff, plan = (shlex.split(command)[1:] for command, _ in console)
    drawn = out(capsys, *draw)
    for line in ("1f1b, 2 ranks, 4 microbatches\n", "critical path of 1f1b", "activation from rank 0     1  1F0 "):
        assert line in drawn
        assert line in part
    assert "planned / measured: " in out(capsys, *diff)
    assert "zb-auto" in out(capsys, *plan)


def test_what_a_plan_and_a_comparison_print_is_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    console = [each for block in blocks(section(DEBUGGING, "A device is full"), "console") for each in commands(block)]
    assert [command.split()[1] for command, _ in console] == ["plan", "compare"]
    require_shown(capsys, console)


def test_every_snippet_of_debugging_is_run() -> None:
    """One begins to watch a process, which only a long run shows, and stops here at once."""
    import faulthandler

    others = [each for each in SNIPPETS if each not in dict(ANSWERED)]
    assert ["faulthandler" in each or "measured.json" in each for each in others] == [True, True]
    try:
        exec(others[1], {})
    finally:
        faulthandler.cancel_dump_traceback_later()


# Checkpoints


@pytest.mark.exhaustive
def test_a_file_is_loaded_trained_and_exported(tmp_path: Path) -> None:
    part = section(CHECKPOINTS, "Load my .pt, export one file")
    loading, exporting = blocks(part, "python")
    (tmp_path / "import.py").write_text(loading, encoding="utf-8")
    (tmp_path / "export.py").write_text(exporting, encoding="utf-8")
    names: dict[str, Any] = {"nn": nn}
    exec(exporting[exporting.index("def build") : exporting.index("module =")], names)
    before = names["build"]().state_dict()
    torch.save(before, tmp_path / "my.pt")
    run_ranks(tmp_path / "import.py", ranks=2, folder=tmp_path)
    [(_, files), (_, exported)] = [each for each in commands(blocks(part, "console")[0]) if each[0].startswith("ls")]
    assert sorted(files.split()) == sorted(path.name for path in (tmp_path / "run" / "step-1").iterdir())
    run_ranks(tmp_path / "export.py", ranks=1, folder=tmp_path)
    assert exported.split() == sorted(path.name for path in tmp_path.glob("*.pt"))
    after = torch.load(tmp_path / "tuned.pt", weights_only=True)
    names["build"]().load_state_dict(after)
    assert all(0 < (after[name] - before[name]).abs().max() < 2e-3 for name in before)


# Stages


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.exhaustive
def test_stages_by_hand_learn(tmp_path: Path, ranks: int) -> None:
    losses = losses_of(BY_HAND, ranks, tmp_path)
    assert len(losses) == 4
    assert losses[-1][1] < losses[0][1] / 2


def test_stages_by_hand_need_no_word_about_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where ranks compute elsewhere than on the CPU; of the meta device, which has no values, no loss is printed."""
    monkeypatch.setattr(pipeflow, "launch", current_context)
    script = BY_HAND.replace("range(200)", "range(2)").replace("output.loss:.4f", "output.loss")

    def run() -> tuple[str, set[str]]:
        names: dict[str, Any] = {}
        exec(script, names)
        return str(names["output"].loss), {parameter.device.type for parameter in names["model"].parameters()}

    first, last = run_threads(run, 2, device="meta")
    assert (first[0], first[1], last[1]) == ("None", {"meta"}, {"meta"})
    assert "device='meta'" in last[0]


def test_the_snippets_about_modules_and_lists_run() -> None:
    whole, rules, layers = (
        blocks(STAGES, "python", start)[0] for start in ("model =", "from pipeflow.tensor", "blocks")
    )

    batch = {"inputs": torch.randn(8, 16), "labels": torch.randn(8, 1)}
    scored = Scored()  # drawn here, since the ranks are threads that share torch's generator

    def run() -> tuple[Any, int]:
        schedule, module = pipeflow.make_schedule("1f1b", ranks=2, microbatches=4), deepcopy(scored)
        names: dict[str, Any] = {"pipeflow": pipeflow, "schedule": schedule, "module": module, "batch": batch}
        names |= {"data_iter": iter([batch]), "nn": nn, "partial": partial}
        exec(whole, names)
        loss = names["output"].loss
        exec(rules, names)
        assert names["rules"][1:] == [*DEFAULT_RULES]
        exec(layers, names)
        return loss, sum(parameter.numel() for parameter in names["model"].parameters())

    (nothing, first), (loss, last) = run_threads(run, 2)
    assert nothing is None
    assert loss.isfinite()
    assert first + last == 16 * 64 + 64 + 12 * (64 * 64 + 64) + 64 + 1


class Scored(nn.Module):
    """A module that computes its own loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            inputs = layer(inputs)
        return nn.functional.mse_loss(inputs.mean(1, keepdim=True), labels)


class Block(nn.Module):
    """A block with a layer that the rule of the guide splits."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.ModuleDict({"qkv": nn.Linear(16, 48), "proj": nn.Linear(16, 16)})

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        query, key, value = self.attn["qkv"](hidden).chunk(3, -1)
        mixed: torch.Tensor = self.attn["proj"](query * key.tanh() * value)
        return hidden + mixed


# Training


@pytest.mark.some(1)
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.slow
def test_the_trainer_learns_and_goes_on(tmp_path: Path, ranks: int) -> None:
    (tmp_path / "train.py").write_text(TRAINER, encoding="utf-8")
    said = run_ranks(tmp_path / "train.py", ranks=ranks, folder=tmp_path)
    accuracies = [float(each) for each in re.findall(r"epoch \d/8, test: loss = \S+, accuracy = ([\d.]+)", said)]
    assert len(accuracies) == 8
    assert accuracies[-1] > 0.9 > accuracies[0]
    (tmp_path / "train.py").write_text(TRAINER.replace("epochs=8", "epochs=9"), encoding="utf-8")
    again = run_ranks(tmp_path / "train.py", ranks=3 - ranks, folder=tmp_path)
    assert re.findall(r"epoch (\d/\d), test", again) == ["9/9"]


@pytest.mark.exhaustive
def test_a_schedule_that_steps_the_optimizer_learns(tmp_path: Path) -> None:
    losses = losses_of(STEPPING, 2, tmp_path)
    assert [step for step, _ in losses] == [0, 10, 20, 30, 40]
    assert losses[-1][1] < losses[0][1] / 2


@pytest.mark.exhaustive
def test_texts_of_different_lengths_are_learned(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(LENGTHS, encoding="utf-8")
    said = run_ranks(tmp_path / "train.py", ranks=2, folder=tmp_path)
    losses = [float(each) for each in re.findall(r"Train\]: loss = ([\d.]+)", said)]
    assert len(losses) == 3
    assert losses[-1] < 0.5 * losses[0]


def test_the_hybrid_script_needs_no_word_about_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """As above; what has no values is neither clipped nor saved, and no loss is told to all."""
    monkeypatch.setattr(pipeflow, "launch", lambda **_: current_context())
    monkeypatch.setattr(pipeflow, "latest_checkpoint", lambda _: None)
    monkeypatch.setattr(pipeflow, "clip_grad_norm_", lambda *_: None)
    saved: list[str] = []
    monkeypatch.setattr(pipeflow, "save_checkpoint", lambda path, *_, **__: saved.append(path))
    script = (
        HYBRID.replace("first + 50", "first + 2").replace("{output.loss:.4f}", "").replace(", broadcast_loss=True", "")
    )

    def run() -> tuple[str, set[str]]:
        names: dict[str, Any] = {}
        exec(script, names)
        return str(names["output"].loss), {parameter.device.type for parameter in names["model"].parameters()}

    found_on = run_threads(run, 4, tensor=2, device="meta")
    assert [("device='meta'" in loss, devices) for loss, devices in found_on] == [(True, {"meta"})] * 2 + [
        (False, {"meta"})
    ] * 2
    assert saved == ["run/step-2"] * 4


@pytest.mark.exhaustive
def test_the_hybrid_script_goes_on_under_another_layout(tmp_path: Path) -> None:
    script = HYBRID.replace("first + 50", "first + 30")
    losses = losses_of(script, 4, tmp_path) + losses_of(script, 8, tmp_path)
    assert [step for step, _ in losses] == list(range(0, 60, 10))
    assert losses[0][1] > 2 * losses[2][1] > 2 * losses[-1][1]


@pytest.mark.slow
def test_the_script_with_context_ranks_trains_as_one_process(tmp_path: Path) -> None:
    alone = OVER_CONTEXT.replace("pipeline=2, context=2", "pipeline=1").replace("ranks=2", "ranks=1")
    losses = losses_of(OVER_CONTEXT, 4, tmp_path)
    require_alike(losses, losses_of(alone, 1, tmp_path))
    assert losses[0][1] > 1.5 * losses[-1][1]


@pytest.mark.slow
def test_the_script_with_experts_over_ranks_trains_as_with_whole_layers(tmp_path: Path) -> None:
    losses = losses_of(OVER_EXPERTS, 4, tmp_path)
    require_alike(losses, losses_of(OVER_EXPERTS.replace(", experts=2", ""), 4, tmp_path))
    assert losses[0][1] > 1.2 * losses[-1][1]


@pytest.mark.slow
def test_the_script_with_slices_trains_as_with_whole_sequences(tmp_path: Path) -> None:
    losses = losses_of(IN_SLICES, 2, tmp_path)
    require_alike(losses, losses_of(IN_SLICES.replace(", slices=4", ""), 2, tmp_path))
    assert losses[0][1] > 1.5 * losses[-1][1]


# Working with schedules


def test_the_values_of_schedules_are_those_shown() -> None:
    assert doctest.testfile(str(ROOT / "docs" / "simulating.md"), module_relative=False).failed == 0


def test_the_plans_of_the_guide_are_those_shown() -> None:
    assert doctest.testfile(str(ROOT / "docs" / "planning.md"), module_relative=False).failed == 0


@pytest.mark.exhaustive
def test_a_plan_leads_to_a_step_and_the_step_to_a_better_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The commands as they stand there, but for the seconds of the measurement."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    text = section(guide("docs/planning.md"), "From a plan to a first step")
    [script], [difference] = blocks(text, "python"), blocks(text, "diff")
    listed = [shlex.split(command) for console in blocks(text, "console") for command, _ in commands(console)]
    measure, plan, torchrun, explain, again = listed
    out(capsys, *("1" if word == "20" else word for word in measure[1:]))
    planned = out(capsys, *plan[1:])
    [used] = re.findall(r"in train.py:\n((?:  .*\n)+)", planned)
    assert used.splitlines()
    others = [line for line in used.splitlines() if line.strip() not in script.splitlines()]
    assert all("make_schedule(" in line for line in others)  # which schedule is fastest depends on the machine
    assert f"  {' '.join(torchrun)}\n" in planned
    losses = losses_of(script, 2, tmp_path)
    assert [step for step, _ in losses] == [0, 1, 2, 3]
    assert "step: " in out(capsys, *explain[1:])
    assert "measured" in out(capsys, *again[1:])
    assert f"  pipeflow {' '.join(again[1:-2])}\n" in planned
    require_alike(losses_of(changed(script, difference), 2, tmp_path), losses)


def test_the_commands_for_other_libraries_run(capsys: pytest.CaptureFixture[str]) -> None:
    """Each prints what its library reads, or the layout that it was given."""
    text = section(guide("docs/planning.md"), "For other libraries")
    listed = [shlex.split(command)[1:] for console in blocks(text, "console") for command, _ in commands(console)]
    shown = []
    for words in listed:
        assert main(words) == 0
        shown.append(capsys.readouterr().out)
    assert "\nlayout: Ett|(tt|)*34,ttt|(tt|)*3,tL\n" in shown[0]
    assert "--global-batch-size 128\n" in shown[1]
    assert "data_parallel_shard_degree = 4\n" in shown[2]


def test_the_first_picture_is_the_commands(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    [console] = blocks(SIMULATING, "console", "$ pipeflow draw 1f1b --ranks")
    require_shown(capsys, commands(console))


@pytest.mark.slow
def test_the_list_of_commands_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All but the search over 512 devices, which other tests run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    [console] = blocks(SIMULATING, "console", "$ pipeflow list")
    listed = [shlex.split(command)[1:] for command, _ in commands(console)]
    assert len(listed) == 11
    for words in listed:
        if "--devices" not in words:
            assert out(capsys, *words) or words[0] in ("draw", "export") or "--animate" in words


# Memory


def test_what_saving_memory_costs_is_shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = guide("docs/memory.md")
    for console in blocks(text, "console"):
        for command, answer in commands(console):
            require_shown(capsys, [(command, answer.removesuffix("...\n"))])
    for snippet in blocks(text, "python"):
        exec(snippet, {})
    [shown] = blocks(text, "text")
    assert capsys.readouterr().out == shown


# Explaining


def test_the_trace_of_the_guide_is_explained_as_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "docs").symlink_to(ROOT / "docs")
    first, second, job, _ = blocks(EXPLAINING, "console")
    require_shown(capsys, [*commands(first), *commands(job)])
    listed = [command for command, _ in commands(second)]
    for command in listed:
        out(capsys, *shlex.split(command)[1:])
    assert {path.name for path in tmp_path.iterdir()} == {"docs", "explained.html", "ran.csv", "best.csv"}
    assert (tmp_path / "explained.html").read_text(encoding="utf-8").count("<h2") >= 3
    [text] = blocks(EXPLAINING, "python", "import pipeflow")
    exec(compile(text, "explaining.md", "exec"), {})
    assert "('1f1b',)" in capsys.readouterr().out


# Rules


def test_every_benchmark_that_a_guide_names_has_a_result() -> None:
    for document in documents():
        for name in re.findall(r"python -m benchmarks ([a-z]\w*)`", document.text):
            assert name in TIMED, document.name
            assert json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text(encoding="utf-8"))


def wide_lines(source: Source) -> Iterator[Fault]:
    """Lines of blocks that do not fit on a page."""
    fences = [found.start() for found in re.finditer(r"^```", source.text, re.MULTILINE)]
    for begin, end in list(pairwise(fences))[::2]:
        if source.text[begin:].startswith("```{"):
            continue  # a note
        first = line_of(source.text, begin)
        for number, line in enumerate(source.text[begin:end].splitlines()):
            if number and len(line) > WIDTH:
                yield first + number, f"{len(line)} columns, more than {WIDTH}"


@pytest.mark.lint
def test_blocks_fit_on_a_page() -> None:
    require(wide_lines, (each for each in documents() if each.name not in GENERATED and "/design/" not in each.name))


@pytest.mark.lint
def test_the_guard_sees_wide_lines() -> None:
    text = f"{'a' * 120}\n```python\n{'b' * 101}\n{'c' * 100}\n```\n{'d' * 120}\n```{{note}}\n{'e' * 101}\n```\n"
    assert [line for line, _ in wide_lines(Source("docs/one.md", text))] == [3]
