"""Every answer begins with its conclusion, in a sentence."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pipeflow import make_schedule, simulate
from pipeflow.tools.cli.conclusions import change_said
from tests.cli.run import out

SIZES = ("--ranks", 4, "--microbatches", 8)


def first(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    """The first sentence that a command prints, in one line."""
    return " ".join(out(capsys, *words).partition(".\n")[0].split()) + "."


def test_a_drawing_and_its_measures_begin_with_the_idle_time(capsys: pytest.CaptureFixture[str]) -> None:
    said = "A step takes 25.5; its busiest rank is idle for 5.9% of it."
    assert first(capsys, "draw", "zb-v", *SIZES) == said
    assert first(capsys, "simulate", "zb-v", *SIZES) == said
    assert json.loads(out(capsys, "simulate", "zb-v", "--json"))  # alone


def test_a_comparison_names_the_fastest_and_the_leanest(capsys: pytest.CaptureFixture[str]) -> None:
    found = first(capsys, "compare", "1f1b", "v-min", "zb-v", *SIZES)
    assert found == "zb-v takes the least time, 25.5; v-min keeps the least, 2 activations."
    many = first(capsys, "compare", "gpipe", "1f1b", "eager-1f1b", "hanayo", *SIZES)
    assert many.startswith("gpipe, 1f1b and 2 more take the least time, 33; ")
    assert many.endswith("1f1b and hanayo keep the least, 4 activations.")
    assert first(capsys, "compare", "1f1b", "zb-h1", *SIZES, "--saved-bytes", 1024).endswith("keep the least, 4 KiB.")


def test_a_difference_says_which_is_faster(capsys: pytest.CaptureFixture[str]) -> None:
    assert first(capsys, "diff", "1f1b", "zb-h1") == "zb-h1 takes 18.2% less time than 1f1b: 27, not 33."
    assert first(capsys, "diff", "zb-h1", "1f1b") == "1f1b takes 22.2% more time than zb-h1: 33, not 27."
    assert first(capsys, "diff", "1f1b", "gpipe") == "gpipe takes as long as 1f1b: 33."
    assert first(capsys, "diff", "1f1b", "1f1b") == "second takes as long as first: 33."
    assert change_said("a", 0.0, "b", 1.0, str) == "b takes as long as a: 0.0."


def test_a_plan_says_its_time_its_idle_time_and_whether_it_fits(capsys: pytest.CaptureFixture[str]) -> None:
    model = ("plan", "gpt3-175b", "--tensor", 8, "--microbatches", 64)
    found = first(capsys, *model, "--pipeline", 8)
    assert re.fullmatch(
        r"The busiest rank is idle for 9\.6% of a step, and rank 0 needs the most memory, [\d.]+ GiB\.", found
    )
    for pipeline, fits in ((8, "which fits"), (2, "which does not fit")):
        found = first(capsys, *model, "--pipeline", pipeline, "--device", "a100-80gb")
        assert re.match(r"A step takes [\d.]+ s, the busiest rank is idle for [\d.]+% of it, and rank 0 needs", found)
        assert found.endswith(f"GiB, {fits}.")


def test_a_measured_step_names_the_best_order(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A planned step stands for a measured one."""
    file = tmp_path / "run.json"
    faster = r"\S+ would save [1-9][\d.]+% of the step within the same memory\."
    for ran, said in (("naive", faster), ("zb-v", r"No schedule within the same memory is faster than zb-v\.")):
        file.write_text(simulate(make_schedule(ran, ranks=2, microbatches=4)).to_json(), encoding="utf-8")
        assert re.fullmatch(said, first(capsys, "plan", "--measured", file))


@pytest.mark.slow
def test_a_search_names_the_recommended_layout(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("plan", "llama3-8b", "--devices", 8, "--batch", 16, "--device", "a100-80gb")
    shown = out(capsys, *words)
    row = re.search(r"^\d\* +(.*?) +(\d+)x(\d+)x(\d+)(?:x1)? .*? ([\d.]+ m?s) ", shown, re.MULTILINE)
    assert row is not None
    schedule, tensor, pipeline, data, step = row.groups()
    said = f"The recommended layout takes {step} a step: {schedule}, tensor {tensor}, pipeline {pipeline}, data {data}."
    assert first(capsys, *words).startswith(said)


@pytest.mark.parametrize(("microbatches", "says"), [(8, False), (128, True)])
def test_a_drawing_that_is_too_dense_says_what_shows_all(
    capsys: pytest.CaptureFixture[str], microbatches: int, says: bool
) -> None:
    drawn = out(capsys, "draw", "1f1b", "--ranks", 2, "--microbatches", microbatches)
    assert ("--html FILE draws every block" in drawn) is says


@pytest.mark.slow
def test_a_list_in_a_narrow_terminal_breaks_no_word() -> None:
    """In a terminal of its own, which a pipe is not."""
    script = (
        "import os, pty, sys; os.environ.update(COLUMNS='48', TERM='dumb'); "
        f"pty.spawn([{sys.executable!r}, '-m', 'pipeflow', 'list'])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert max(map(len, lines[1:])) <= 48
    assert "--extra-warmup" in done.stdout
    assert not any(line.endswith("-") for line in lines)
