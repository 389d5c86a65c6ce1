"""What the README shows is run as it stands there, and is short."""

from __future__ import annotations

import ast
import re
import runpy
from pathlib import Path

import pytest

from benchmarks import figures
from pipeflow.tools.cli.command import main
from tests.guides import blocks, commands, guide, section, side
from tests.scripts import run_ranks

README = guide("README.md")
[LOOP], [WHOLE] = blocks(README, "diff"), blocks(README, "python")
ORDER = (  # what stands where
    "(docs/getting-started.md)",
    "(docs/pictures/flow.svg)",
    "--animate flow.svg",
    "```diff",
    "python -m benchmarks",
    "Works today:",
    "has never run over NCCL",
    "```python",
    "make demo",
    "(docs/reference/running.md)",
    "## Compared",
)
PARTS = {  # of the project's own description, and a word of the page that says more
    "`execute_pipeline`": "execute_pipeline",
    "schedules": "1f1b",
    "`pipeflow draw`": "pipeflow draw",
    "`partition_uniform`": "partition_uniform",
    "shared embeddings": "PipelineSharedModuleWrapper",
    "`TENSOR_SHAPE`": "tensor_shape",
    "Tensor layers": "ColumnParallelLinear",
    "GPT-3 example": "GPT-3",
    "ViT example": "vision transformer",
    "hybrid example": "configuration",
    "the planner": "layout",
    "`pipeflow explain`": "pipeflow explain",
    "`pipeflow check`": "pipeflow check",
}


@pytest.mark.lint
def test_it_is_short_and_in_the_order_in_which_a_stranger_asks() -> None:
    lines = README.splitlines()
    assert len(lines) <= 200
    places = [README.index(text) for text in ORDER]
    assert places == sorted(places)
    assert lines.index("```diff") < 22
    assert "REPOSITORY" not in README


@pytest.mark.lint
def test_each_part_is_linked_to_a_page_that_says_more() -> None:
    rows = dict(re.findall(r"^\| \[(.*?)\]\((.*?)\) \|", section(README, "What it is made of"), re.MULTILINE))
    for part, word in PARTS.items():
        page, _, anchor = rows[part].partition("#")
        text = guide(page)
        assert word in text, f"{page} does not say {word}"
        assert not anchor or re.search(rf"^## {anchor.replace('-', ' ')}$", text, re.MULTILINE | re.IGNORECASE)


@pytest.mark.lint
def test_the_numbers_are_those_of_the_results() -> None:
    shown = re.findall(r"\*\*([\d.]+)(?: %)?\*\*.*`python -m benchmarks (\w+)`", section(README, "Three numbers"))
    rows = {name: {row[0]: row for row in figures.result(name)["rows"]} for _, name in shown}
    ratio = float(rows["zero_bubble"]["zb-v: pipeflow"][4])
    planned = rows["planner"]["dgxc-h100, fitted without it"]
    found = [row[-1] for row in rows["checking"].values()]
    assert planned[1] == "48"
    assert set(found) == {"3 of 3"}
    expected = [
        (f"{ratio:.2f}", "zero_bubble"),
        (planned[2].removesuffix(" %"), "planner"),
        (str(len(found)), "checking"),
    ]
    assert shown == expected


@pytest.mark.lint
def test_the_loop_changes_by_a_few_lines() -> None:
    added = [line[1:].strip() for line in LOOP.splitlines() if line.startswith("+")]
    statements = [each for each in ast.parse("\n".join(added)).body if not isinstance(each, ast.Import)]
    assert len(statements) == 4
    assert len(added) <= 10
    assert any(line.lstrip().startswith("#") and "no loss.backward()" in line for line in added)


@pytest.mark.some(1)
@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 1, 3])
def test_the_changed_loop_learns_what_the_loop_learns(
    ranks: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "loop.py").write_text(side(LOOP, "-"), encoding="utf-8")
    (tmp_path / "train.py").write_text(side(LOOP, "+"), encoding="utf-8")
    runpy.run_path(str(tmp_path / "loop.py"))
    expected = re.findall(r"loss ([\d.]+)\n", capsys.readouterr().out)
    said = run_ranks(tmp_path / "train.py", ranks=ranks, folder=tmp_path)
    assert re.findall(r"loss ([\d.]+)\n", said) == expected * ranks
    assert len(expected) == 1


@pytest.mark.slow
def test_the_whole_script_says_what_is_shown(tmp_path: Path) -> None:
    (tmp_path / "whole.py").write_text(WHOLE, encoding="utf-8")
    [(command, shown)] = [
        each for block in blocks(README, "console") for each in commands(block) if "whole.py" in each[0]
    ]
    assert command == "torchrun --nproc-per-node 2 whole.py"
    said = run_ranks(tmp_path / "whole.py", ranks=2, folder=tmp_path)
    picture, losses = shown.partition("step 0")[::2]
    assert picture in said
    numbers = [re.findall(r"loss ([\d.]+)", text) for text in (said, losses)]
    assert [*map(float, numbers[0])] == pytest.approx([*map(float, numbers[1])], abs=2e-4)


def test_the_explorer_has_a_tour(capsys: pytest.CaptureFixture[str]) -> None:
    assert "`pipeflow explore --tour`" in README
    with pytest.raises(SystemExit, match="0"):
        main(["explore", "--help"])
    assert "--tour" in capsys.readouterr().out
