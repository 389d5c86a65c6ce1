"""Files that the command writes, and options that other files of the package bring along."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

import pipeflow.draw
from pipeflow.core.cost import CostModel
from pipeflow.core.errors import UsageError
from pipeflow.core.schedule import Schedule
from pipeflow.core.timeline import Timeline
from pipeflow.schedules import SCHEDULES, make_schedule
from pipeflow.tools.cli import main, requests
from pipeflow.tools.cli.outputs import write
from tests.cli.run import error, out


@pytest.fixture
def formats(monkeypatch: pytest.MonkeyPatch) -> None:
    """Writers that say what they were given."""

    def makespans(timelines: Timeline | Sequence[Timeline], factor: float = 1) -> str:
        several = [timelines] if isinstance(timelines, Timeline) else timelines
        return " ".join(f"{timeline.name} {timeline.makespan * factor:g}" for timeline in several)

    def timed(name: str) -> object:
        return lambda timelines, *, unit, factor, critical_path=False: (
            f"{name} {makespans(timelines, factor)} {unit}{' critical' * critical_path}\n"
        )

    monkeypatch.setattr(pipeflow.draw, "svg", timed("svg"), raising=False)
    monkeypatch.setattr(pipeflow.draw, "html", timed("html"), raising=False)
    monkeypatch.setattr(
        pipeflow.draw, "perfetto", lambda timelines: f"perfetto {makespans(timelines)}\n", raising=False
    )


@pytest.mark.usefixtures("formats")
def test_several_outputs_in_one_call(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    paths = {name: tmp_path / f"drawn.{name}" for name in ("svg", "html")}
    options = [word for name, path in paths.items() for word in (f"--{name}", path)]
    shown = out(capsys, "draw", "1f1b", *options, "--perfetto", "-", "--unit", "ms", "--factor", 1000)
    assert shown == "perfetto 1f1b 33\n"
    assert {name: path.read_text(encoding="utf-8") for name, path in paths.items()} == {
        "svg": "svg 1f1b 33000 ms\n",
        "html": "html 1f1b 33000 ms\n",
    }
    assert sorted(tmp_path.iterdir()) == sorted(paths.values())


@pytest.mark.parametrize("argv", ["draw 1f1b --svg", "diff 1f1b zb-h1 --html", "compare --svg", "export 1f1b --csv"])
def test_a_command_says_what_it_wrote(capsys: pytest.CaptureFixture[str], tmp_path: Path, argv: str) -> None:
    path = tmp_path / "written"
    assert main([*argv.split(), str(path)]) == 0
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", f"wrote {path}\n")
    assert main([*argv.split(), "-"]) == 0
    assert capsys.readouterr() == (path.read_text(encoding="utf-8"), "")


@pytest.mark.usefixtures("formats")
def test_two_timelines_in_one_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "both.html"
    assert out(capsys, "diff", "1f1b", "zb-h1", "--html", path, "--perfetto", "-") == (
        "perfetto first: 1f1b 33 second: zb-h1 27\n"
    )
    assert path.read_text(encoding="utf-8") == "html first: 1f1b 33 second: zb-h1 27 \n"


@pytest.mark.usefixtures("formats")
def test_the_critical_path_beside_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    files = ["--svg", tmp_path / "a.svg", "--html", tmp_path / "a.html", "--perfetto", tmp_path / "a.json"]
    shown = out(capsys, "draw", "1f1b", *files, "--critical-path")
    assert shown.startswith("critical path of 1f1b")
    assert [
        (tmp_path / f"a.{end}").read_text(encoding="utf-8").endswith(" critical\n") for end in ("svg", "html", "json")
    ] == [
        True,
        True,
        False,
    ]
    assert "\n\ncritical path of 1f1b" in out(capsys, "draw", "1f1b", "--critical-path")
    assert error(capsys, "draw", "1f1b", "--svg", "-", "--critical-path").startswith("standard output can take one")
    assert error(capsys, "draw", "1f1b", "--svg", "a", "--html", "a") == "a can take one output, not 2"


@pytest.mark.usefixtures("formats")
def test_nothing_is_written_when_one_of_several_cannot_be(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    there = tmp_path / "there.svg"
    there.write_text("before", encoding="utf-8")
    missing = tmp_path / "missing" / "a.html"
    assert error(capsys, "draw", "1f1b", "--svg", there, "--html", missing) == f"{missing}: No such file or directory"
    assert there.read_text(encoding="utf-8") == "before"
    assert [*tmp_path.iterdir()] == [there]
    assert error(capsys, "draw", "1f1b", "--svg", tmp_path) == f"{tmp_path}: Is a directory"


def test_a_write_that_fails_half_way_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "schedule.csv"
    path.write_text("before", encoding="utf-8")
    with pytest.raises(UnicodeEncodeError):
        write({str(path): "text \udc00"})
    assert path.read_text(encoding="utf-8") == "before"
    assert [*tmp_path.iterdir()] == [path]


def test_links_are_followed_and_devices_written_to(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    link.symlink_to(target)
    write({str(link): "text", os.devnull: "text"})
    assert link.is_symlink()
    assert target.read_text(encoding="utf-8") == "text"
    with pytest.raises(UsageError, match="/dev/full: No space left on device"):
        write({"/dev/full": "text"})


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everything")
def test_a_file_that_may_not_be_written_stays(tmp_path: Path) -> None:
    path = tmp_path / "kept.csv"
    path.touch(mode=0o444)
    with pytest.raises(UsageError, match="Permission denied"):
        write({str(path): "text"})


@pytest.mark.slow
def test_a_full_standard_output_is_one_line() -> None:
    with open("/dev/full", "w", encoding="utf-8") as full:
        run = subprocess.run(
            [sys.executable, "-m", "pipeflow", "list"], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert run.returncode == 2
    assert run.stderr == "pipeflow: error: standard output: No space left on device\n"


def test_an_interrupt_is_quiet(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(*_: object) -> Timeline:
        raise KeyboardInterrupt

    monkeypatch.setattr("pipeflow.planning.schedule_request.simulate", interrupted)
    assert main(["draw", "1f1b"]) == 130
    assert capsys.readouterr().err == ""


def test_a_misspelt_file_has_a_neighbour(capsys: pytest.CaptureFixture[str], csv: Path) -> None:
    near = csv.with_name("shedule.cvs")
    assert error(capsys, "draw", near) == f"{near}: No such file or directory; did you mean {csv}?"
    assert error(capsys, "draw", csv.with_name("x") / "y.csv").endswith("y.csv: No such file or directory")


def test_a_schedule_that_is_made_for_costs_gets_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: dict[str, object] = {}

    def searched(
        ranks: int, microbatches: int, *, cost: CostModel | None = None, memory_cap: float | None = None
    ) -> Schedule:
        seen.update(cost=cost, memory_cap=memory_cap)
        return replace(make_schedule("zb-h1", ranks=ranks, microbatches=microbatches), name="zb-auto")

    for module in (
        "pipeflow.schedules.registry",
        "pipeflow.tools.cli.options",
        "pipeflow.tools.cli.requests",
        "pipeflow.tools.cli.schedules",
    ):
        monkeypatch.setattr(f"{module}.SCHEDULES", {**SCHEDULES, "zb-auto": searched})
    assert "zb-auto" in out(capsys, "draw", "zb-auto", "--forward", 3, "--memory-cap", 2.5, "--microbatches", 5)
    assert seen["memory_cap"] == 2.5
    cost = seen["cost"]
    assert isinstance(cost, CostModel)
    assert cost.forward == (3, 3, 3, 3)
    assert error(capsys, "draw", "gpipe", "--memory-cap", 2).startswith("schedule 'gpipe' does not take memory_cap")


def test_verify_takes_a_memory_cap(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    seen: dict[str, object] = {}

    def verify(_: Schedule, **options: object) -> list[object]:
        seen.update(options)
        return []

    monkeypatch.setattr(requests, "verify", verify)
    assert "is sound" in out(capsys, "verify", "1f1b", "--memory-cap", 2.5)
    assert seen == {"memory_cap": 2.5, "microbatch_factors": ()}
