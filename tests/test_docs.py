"""What the documents show is what there is: the gallery is made anew, and the schedule of one's own is run."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

from benchmarks import figures
from pipeflow import Timeline
from pipeflow.schedules import SCHEDULES
from tests.scripts import run_ranks
from tests.sources import Fault, Source, documents, line_of, prose, require, require_none

ROOT = Path(__file__).parent.parent
OWN = (ROOT / "docs" / "own-schedule.md").read_text(encoding="utf-8")


def run(*argv: str, cwd: Path, code: int = 0) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "80", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, *argv], cwd=cwd, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == code, done.stderr
    return done.stdout


def block(kind: str, start: str = "") -> str:
    """The first block of that kind, of those that start like this."""
    found = re.search(rf"```{kind}\n({re.escape(start)}.*?)```", OWN, re.DOTALL)
    assert found is not None
    return found[1]


@pytest.mark.slow
def test_the_gallery_is_what_the_command_says(tmp_path: Path) -> None:
    run(str(ROOT / "docs" / "gallery.py"), str(tmp_path), cwd=tmp_path)
    for name in ("schedules.md", "schedules.svg"):
        assert (tmp_path / name).read_text(encoding="utf-8") == (ROOT / "docs" / name).read_text(encoding="utf-8"), (
            "make gallery writes it anew"
        )
    sections = re.findall(r"^## (.*)$", (tmp_path / "schedules.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert sections == list(SCHEDULES)


def test_the_figures_are_those_of_their_script(tmp_path: Path) -> None:
    run(str(ROOT / "docs" / "figures.py"), str(tmp_path), cwd=tmp_path)
    made = sorted(file.name for file in tmp_path.iterdir())
    assert made == sorted(
        re.findall(r"\(pictures/(gpt2-[\w-]+\.svg)\)", (ROOT / "docs" / "migration.md").read_text(encoding="utf-8"))
    )
    for name in made:
        assert (tmp_path / name).read_text(encoding="utf-8") == (ROOT / "docs" / "pictures" / name).read_text(
            encoding="utf-8"
        ), "make gallery writes it"


def test_the_moving_picture_is_that_of_the_command_below_it(tmp_path: Path) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    shown, command = re.findall(
        r"\((docs/pictures/flow\.svg)\)|^\$ python3 -m pipeflow (compare .*--animate flow\.svg)$", readme, re.MULTILINE
    )
    run("-m", "pipeflow", *command[1].split(), cwd=tmp_path)
    assert (tmp_path / "flow.svg").read_text(encoding="utf-8") == (ROOT / shown[0]).read_text(encoding="utf-8"), (
        "make pictures writes it"
    )


@pytest.mark.parametrize("document", figures.DOCUMENTS)
def test_measured_figures_are_those_of_the_results(document: str) -> None:
    assert (ROOT / document).read_text(encoding="utf-8") == figures.write(document), (
        "python -m benchmarks --shown --save measures and writes them"
    )


@pytest.mark.slow
def test_the_list_of_models_is_what_is_trained() -> None:
    page = run(
        "-c", "import tried; print(tried.written((tried.ROOT / tried.PAGE).read_text()), end='')", cwd=ROOT / "docs"
    )
    assert page == (ROOT / "docs" / "models.md").read_text(encoding="utf-8"), "make gallery writes it anew"


@pytest.mark.parametrize("names", [["verify", "draw"], ["draw", "export"]])
@pytest.mark.slow
def test_a_schedule_as_a_file(names: list[str], tmp_path: Path) -> None:
    (tmp_path / "mine.csv").write_text(block("csv"), encoding="utf-8")
    console = block("console", f"$ pipeflow {names[0]} mine.csv")
    commands = re.findall(r"^\$ pipeflow (.*)\n((?:[^$].*\n|\n)*)", console, re.MULTILINE)
    assert [command.split()[0] for command, _ in commands] == names
    for command, shown in commands:
        assert run("-m", "pipeflow", *shlex.split(command), cwd=tmp_path).strip() == shown.strip()


@pytest.mark.slow
def test_a_schedule_as_a_function_runs_and_is_compared(tmp_path: Path) -> None:
    script = block("python")
    start = script.index("def grouped")
    assert script[start : script.index("context =")].strip().count("\n") < 20
    (tmp_path / "train.py").write_text(script, encoding="utf-8")
    printed = run_ranks(tmp_path / "train.py", ranks=2, folder=tmp_path, COLUMNS="80")
    assert "grouped, 2 ranks, 6 microbatches" in printed
    timeline = Timeline.from_json((tmp_path / "measured.json").read_text(encoding="utf-8"))
    assert timeline.peak_activations == (3, 3)
    command = re.search(r"\$ pipeflow (diff .*)", OWN)
    assert command is not None
    shown = run("-m", "pipeflow", *shlex.split(command[1]), cwd=tmp_path)
    assert "Both run the same order on every rank." in shown
    assert re.search(r"^planned / measured: \d\.\d{3}$", shown, re.MULTILINE)


PUBLIC = (
    "",
    "accelerate",
    "draw",
    "huggingface",
    "lightning",
    "models",
    "optim",
    "schedules",
    "tensor",
    "testing",
    "training",
)


@pytest.mark.lint
def test_the_reference_has_every_public_name() -> None:
    """Under one of the names that it is imported by."""
    shown = set[int]()
    for page in (ROOT / "docs" / "reference").glob("*.md"):
        for name in re.findall(r"^\.\. auto\w+:: pipeflow\.(\S+)$", page.read_text(encoding="utf-8"), re.MULTILINE):
            owner, _, leaf = name.rpartition(".")
            shown.add(id(getattr(import_module(f"pipeflow.{owner}".rstrip(".")), leaf)))
    modules = [import_module(f"pipeflow.{package}".rstrip(".")) for package in PUBLIC]
    names = [(module, name) for module in modules for name in module.__all__]
    require_none(f"{module.__name__}.{name}" for module, name in names if id(getattr(module, name)) not in shown)


@pytest.mark.slow
def test_the_comparisons_and_pictures_of_choosing_are_the_commands(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "choosing.md").read_text(encoding="utf-8").replace(" \\\n    ", " ")
    shown = re.findall(r"\$ pipeflow ((?:compare|draw) [^\n]*)\n(.*?)```", text, re.DOTALL)
    assert [command.split()[1] for command, _ in shown][:3] == ["naive", "gpipe", "1f1b"]
    assert len(shown) == 5
    for command, table in shown:
        assert run("-m", "pipeflow", *shlex.split(command), cwd=tmp_path).startswith(table)


def dead_links(source: Source) -> Iterator[Fault]:
    for found in re.finditer(r"\]\((?!https?:)([^)#]+)", source.text):
        if not ((ROOT / source.name).parent / found[1]).exists():
            yield line_of(source.text, found.start()), f"there is no {found[1]}"


@pytest.mark.lint
def test_links_between_documents_lead_somewhere() -> None:
    require(dead_links, documents())


@pytest.mark.lint
def test_the_guard_sees_dead_links() -> None:
    text = "[a](schedules.md)\n[b](never.md#c)\n[d](https://never)\n[e](#f) [g](../README.md)\n"
    assert list(dead_links(Source("docs/one.md", text))) == [(2, "there is no never.md")]


LONGEST = 25
GUIDES = ("README.md", "CONTRIBUTING.md", "docs/*.md", "docs/howto/*.md", "docs/recording/*.md", "docs/reference/*.md")
OTHERS = {"docs/design.md"}  # for those who read the code


def long_sentences(source: Source) -> Iterator[Fault]:
    for line, paragraph in prose(source):
        for sentence in re.split(r"[.?!][\"')]*\s+", paragraph):
            if (words := len(re.findall(r"\S*\w\S*", sentence))) > LONGEST:
                yield line, f"{words} words, more than {LONGEST}: {sentence[:60]} ..."


@pytest.mark.lint
def test_sentences_of_guides_are_short() -> None:
    pages = [Source.read(path, ROOT) for pattern in GUIDES for path in sorted(ROOT.glob(pattern))]
    require(long_sentences, (each for each in pages if each.name not in OTHERS))


@pytest.mark.lint
def test_the_guard_sees_long_sentences() -> None:
    long = "word " * LONGEST
    hidden = f"# {long}a\n| {long}b |\n```text\n{long}c\n```\n<!-- {long}d -->\n```{{toctree}}\n{long}\n```\n"
    seen = (
        f"{long}e.\n\n- {long}.\n- `a`, `b` {long}\n\n```{{note}}\n{long}\nf\n```\n1. [two words](of/a/link) {long}\n"
    )
    short = f"\n{long.strip()}. {long.strip()}?\nYes. [{long}](a.md).\n"
    assert [line for line, _ in long_sentences(Source("docs/one.md", hidden + seen + short))] == [10, 13, 16, 19]


@pytest.mark.lint
def test_the_messages_of_the_index_are_raised() -> None:
    """Each part of a message, between its dots, stands in the package or is Python's own."""
    source = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "pipeflow").rglob("*.py"))
    joined = re.sub(r'"\s*\n\s*f?"', "", source)
    written = (ROOT / "docs" / "messages.md").read_text(encoding="utf-8")
    messages = re.findall(r"^\| `(.*?)` \|", written, re.MULTILINE)
    assert len(messages) >= 25
    parts = [part.strip() for message in messages for part in re.split(r"\.\.\.|: ", message) if len(part.strip()) > 5]
    assert [part for part in parts if part not in joined] == []
