from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pipeflow import __version__
from pipeflow.core.placement import Placement
from pipeflow.schedules import SCHEDULES, make_schedule, options_of
from pipeflow.tools.cli import main
from pipeflow.tools.cli.options import flag
from tests.cli.run import error, out


def test_list_says_names_options_and_what_each_is(capsys: pytest.CaptureFixture[str]) -> None:
    first, *lines = out(capsys, "list").splitlines()
    assert first.startswith(f"{len(SCHEDULES)} schedules, ")
    assert [line.split()[0] for line in lines] == list(SCHEDULES)
    for name, line in zip(SCHEDULES, lines, strict=True):
        assert line.endswith((SCHEDULES[name].__doc__ or "").splitlines()[0])
        flags = {word for word in line.split() if word.startswith("--")}
        assert flags == {"--costs" if option == "cost" else flag(option) for option in options_of(name)}


@pytest.mark.slow
def test_a_python_without_docstrings_only_lacks_help() -> None:
    """The help of a plan's options is that of docstrings."""
    argv = [sys.executable, "-OO", "-m", "pipeflow", "plan", "tiny", "--pipeline", "2"]
    assert "activations: " in subprocess.run(argv, capture_output=True, text=True, check=True).stdout


def test_a_fault_of_its_own_is_a_sentence(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise ZeroDivisionError("division by zero\nand more" + "x" * 10**4)

    monkeypatch.setattr("pipeflow.tools.cli.names.options_of", fails)
    said = error(capsys, "list")
    assert said.startswith(
        "this is a fault of pipeflow, please report it: ZeroDivisionError: division by zero and more"
    )
    assert re.search(r"x \(test_command\.py:\d+\)$", said)
    assert len(said) < 600


def test_draw(capsys: pytest.CaptureFixture[str]) -> None:
    assert out(capsys, "draw", "1f1b", "--ranks", 2, "--microbatches", 4) == """\
A step takes 15; its busiest rank is idle for 20.0% of it.
1f1b, 2 ranks, 4 microbatches
        0                   5                   10                  15
rank 0  F0- F1- ........B0----- F2- B1----- F3- B2----- ....B3-----
peak 2  1   2                                           1
rank 1  ....F0- B0----- F1- B1----- F2- B2----- F3- B3----- ........
peak 1      1                                               0
makespan 15  bubble 20.0%  peak activations 2 1

F forward   B backward   . idle   1-2 activations kept
"""  # fmt: skip


def test_draw_without_options_is_4_ranks_and_8_microbatches(capsys: pytest.CaptureFixture[str]) -> None:
    drawing = out(capsys, "draw", "interleaved-1f1b")
    assert drawing.splitlines()[1] == "interleaved-1f1b, 4 ranks, 2 chunks, 8 microbatches"
    assert "\x1b" not in drawing
    assert max(map(len, drawing.splitlines())) <= 80


def test_draw_forward_only(capsys: pytest.CaptureFixture[str]) -> None:
    drawing = out(capsys, "draw", "gpipe", "--ranks", 2, "--microbatches", 3, "--forward-only")
    assert drawing.splitlines()[1] == "gpipe (forward only), 2 ranks, 3 microbatches"
    assert "B backward" not in drawing


@pytest.mark.slow
def test_what_a_search_is_for_and_may_keep_are_options(capsys: pytest.CaptureFixture[str]) -> None:
    costs = ["--forward", 3, "--backward-input", 4, "--backward-weight", 2, "--transfer", 0.5]
    costs += ["--saved-bytes", 3, "--deferred-bytes", 1]

    def found(*options: object) -> dict[str, Any]:
        measures = json.loads(out(capsys, "simulate", "zb-auto", *costs, *options, "--json"))
        assert isinstance(measures, dict)
        return measures

    step, papers = (found("--memory-cap", 4, "--objective", objective) for objective in ("makespan", "span"))
    assert step["makespan"] < papers["makespan"]
    assert papers["span"] <= step["span"]
    assert max(found("--bytes-cap", 10)["peak_bytes"]) <= 10 < max(found()["peak_bytes"])
    assert found("--memory-cap", "4,3,2,1")["peak_activations"] == [4, 3, 2, 1]
    assert "known: makespan, span" in error(capsys, "draw", "zb-auto", "--objective", "bubble")
    assert "bytes_cap needs costs with saved_bytes" in error(capsys, "draw", "zb-auto", "--bytes-cap", 10)
    assert "it must be a number, got 'x'" in error(capsys, "draw", "zb-auto", "--memory-cap", "1,x")


def test_simulate(capsys: pytest.CaptureFixture[str]) -> None:
    assert out(capsys, "simulate", "1f1b", "--forward", 2, "--transfer", 0.5) == (
        "A step takes 52; its busiest rank is idle for 38.5% of it.\nmakespan          52\nspan              52\n"
        "bubble            38.5% of the makespan, in which the busiest rank is idle\nbubble of span    38.5%\n"
        "idle by rank      20 20 20 20\n"
        "peak activations  4 3 2 1\ncritical path     computing 44, waiting 8 (15.4%)\n  by rank         8 12 12 12\n"
    )


def test_simulate_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    read = json.loads(out(capsys, "simulate", "interleaved-1f1b", "--chunks", 4, "--json"))
    assert read == {
        "makespan": 26.25,
        "span": 26.25,
        "makespan_bubble_ratio": pytest.approx(2.25 / 26.25),
        "bubble_ratio": pytest.approx(2.25 / 26.25),
        "idle": [2.25] * 4,
        "peak_activations": [4.75, 4.25, 3.75, 3.25],
        "critical_path": {"computing": 26.25, "waiting": 0, "computing_by_rank": [6.75, 0.75, 0.75, 18]},
    }


def test_costs_are_those_of_a_whole_share(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--forward", 1, "--backward-input", 2, "--backward-weight", 3, "--json", "--microbatches", 4]
    read = json.loads(out(capsys, "simulate", "gpipe", "--ranks", 1, *options))
    assert read["makespan"] == 24


@pytest.mark.some(7)
@pytest.mark.parametrize("name", SCHEDULES)
def test_export_verify_draw_and_simulate_agree_on_a_file(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str
) -> None:
    path = tmp_path / "exported"  # a file is a file, whatever its name ends in
    assert out(capsys, "export", name, "--ranks", 2, "--microbatches", 3, "--csv", path) == ""
    schedule = make_schedule(name, ranks=2, microbatches=3)
    assert path.read_text(encoding="utf-8") == schedule.to_csv()
    assert out(capsys, "export", path, "--csv", "-") == path.read_text(encoding="utf-8")
    assert "is sound: 2 ranks" in out(capsys, "verify", path)
    placements = {Placement.vee(2): "vee", Placement.bidirectional(2): "bidirectional"}
    assert "is sound: 2 ranks" in out(
        capsys, "verify", path, "--placement", placements.get(schedule.placement, "looped")
    )
    named = out(capsys, "simulate", name, "--ranks", 2, "--microbatches", 3)
    assert out(capsys, "simulate", path) == named
    drawn = out(capsys, "draw", name, "--ranks", 2, "--microbatches", 3).splitlines()
    again = out(capsys, "draw", path).splitlines()
    assert [again[0], *again[-len(drawn) + 2 :]] == [drawn[0], *drawn[2:]]


def test_verify_a_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert out(capsys, "verify", "1f1b", "--ranks", 3, "--microbatches", 5) == (
        "1f1b is sound: 3 ranks, 3 stages, 5 microbatches\n"
    )


def test_verify_lists_every_violation_and_exits_with_1(capsys: pytest.CaptureFixture[str], csv: Path) -> None:
    csv.write_text("0F0,0F1,0B0\n1F0,1B0,1F1,1B1,1B1\n", encoding="utf-8")
    assert main(["verify", str(csv)]) == 1
    captured = capsys.readouterr()
    assert captured.err == ""
    assert captured.out.splitlines() == [
        "The schedule is unsound: it has 2 violations.",
        "rank 0: 0B1 is missing: stage 0 runs 0F1 for microbatch 1",
        "rank 1, position 4: 1B1 runs again: it is on rank 1 already, at position 3",
    ]


def test_verify_shows_a_deadlock(capsys: pytest.CaptureFixture[str], csv: Path) -> None:
    csv.write_text("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n", encoding="utf-8")
    assert main(["verify", str(csv)]) == 1
    assert "deadlock: 0B0 on rank 0 needs the gradient of 1B0, which rank 1 runs later" in capsys.readouterr().out


def test_verify_expects_the_microbatches_it_is_told(capsys: pytest.CaptureFixture[str], csv: Path) -> None:
    assert main(["verify", str(csv), "--microbatches", "3"]) == 1
    assert capsys.readouterr().out.splitlines()[1:] == [
        "rank 0: 0F2 and 0B2 are missing: stage 0 runs nothing for microbatch 2",
        "rank 1: 1F2 and 1B2 are missing: stage 1 runs nothing for microbatch 2",
    ]


@pytest.mark.parametrize(
    ("placement", "text"),
    [
        ("vee", "0F0,3F0,3B0,0B0\n1F0,2F0,2B0,1B0\n"),
        ("vee", make_schedule("hanayo", ranks=2, microbatches=3, waves=2).to_csv()),
        ("bidirectional", "0F0,1F1,1B1,0B0\n0F1,1F0,1B0,0B1\n"),
        ("looped", "0F0,2F0,2B0,0B0\n1F0,3F0,3B0,1B0\n"),
        ("linear", "0F0,0B0\n1F0,1B0\n"),
    ],
)
def test_the_placement_of_a_file_can_be_given(
    capsys: pytest.CaptureFixture[str], csv: Path, placement: str, text: str
) -> None:
    csv.write_text(text, encoding="utf-8")
    assert "is sound: 2 ranks" in out(capsys, "verify", csv, "--placement", placement)
    assert out(capsys, "draw", csv, "--placement", placement)
    wrong = "linear" if placement != "linear" else "vee"
    assert main(["verify", str(csv), "--placement", wrong]) == 1


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("draw interleaved-f1b", "unknown schedule 'interleaved-f1b'; did you mean 'interleaved-1f1b'?"),
        ("draw gpipe --chunks 2", "schedule 'gpipe' does not take chunks; it has no options"),
        ("draw 1f1b --ranks 0", "ranks must be an integer of at least 1, got 0"),
        ("draw 1f1b --microbatches -3", "microbatches must be an integer of at least 1, got -3"),
        ("draw interleaved-1f1b --chunks 0", "chunks must be an integer of at least 1, got 0"),
        (
            "draw 1f1b --ranks four",
            "argument --ranks: it must be a whole number, got 'four' (see pipeflow draw --help)",
        ),
        (
            "draw 1f1b --forward -1",
            "argument --forward: it must be finite and not negative, got -1 (see pipeflow draw --help)",
        ),
        (
            "simulate 1f1b --transfer nan",
            "argument --transfer: it must be finite and not negative, got nan (see pipeflow simulate --help)",
        ),
        ("draw gpipe --unit s --factor 0", "argument --factor: it must be positive, got 0 (see pipeflow draw --help)"),
        ("draw 1f1b --placement vee", "--placement is for CSV files; schedule '1f1b' has its own"),
        ("verify missing.csv", "missing.csv: No such file or directory"),
        ("verify missing.csv --ranks 2", "--ranks is for named schedules; missing.csv has its own"),
        ("export 1f1b", "the following arguments are required: --csv, as in --csv FILE (see pipeflow export --help)"),
        ("export 1f1b --csv missing/folder.csv", "missing/folder.csv: No such file or directory"),
        ("draw", "the following arguments are required: SCHEDULE (see pipeflow draw --help)"),
        (
            "draw 1f1b --forward 1e308",
            "argument --forward: it must be 0, or from 1e-100 to 1e+100, got 1e308 (see pipeflow draw --help)",
        ),
        (
            "draw 1f1b --factor 1e308",
            "argument --factor: it must be from 1e-100 to 1e+100, got 1e308 (see pipeflow draw --help)",
        ),
    ],
)
def test_what_cannot_work_is_one_line_and_exit_2(capsys: pytest.CaptureFixture[str], argv: str, message: str) -> None:
    assert error(capsys, *argv.split()) == message


@pytest.mark.parametrize("command", ["draw", "simulate", "verify", "compare", "diff 1f1b"])
def test_names_of_schedules_are_read_in_any_case(capsys: pytest.CaptureFixture[str], command: str) -> None:
    lower, upper = (out(capsys, *command.split(), name) for name in ("zb-h1", "ZB-H1"))
    assert upper == lower
    assert make_schedule("ZB-H1", ranks=2, microbatches=2) == make_schedule("zb-h1", ranks=2, microbatches=2)


def test_the_command_alone_is_help(capsys: pytest.CaptureFixture[str]) -> None:
    shown = out(capsys)
    assert shown.startswith("usage: pipeflow")
    assert "compare" in shown
    assert "examples:" in shown


def test_the_largest_costs_that_are_taken_can_be_drawn(capsys: pytest.CaptureFixture[str]) -> None:
    largest = [word for name in ("forward", "transfer", "saved-bytes", "factor") for word in (f"--{name}", "1e100")]
    assert "inf" not in out(capsys, "draw", "zb-h1", *largest)
    assert "inf" not in out(capsys, "simulate", "zb-h1", *largest)
    assert "inf" not in out(capsys, "compare", "1f1b", "zb-h1", *largest[:-2])
    assert "nan" not in out(capsys, "draw", "zb-h1", "--forward", 1e-100, "--backward-input", 1e100)


@pytest.mark.parametrize(
    ("times", "message"),
    [("1e308], [1", "a time must be"), ("1], [1e-320", None), ("1e-320], [1e-320", None)],
)
def test_times_of_any_size_are_drawn_or_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, times: str, message: str | None
) -> None:
    """Written as [end of the forward], [how long the backward is]."""
    end, length = (float(time) for time in times.split("], ["))
    path = tmp_path / "measured.json"
    path.write_text(
        f'{{"paths": [[0]], "rows": [[["0F0", 0, {end!r}], ["0B0", {end!r}, {end + length!r}]]]}}', encoding="utf-8"
    )
    for drawing in ([], ["--svg", "-"], ["--html", "-"], ["--perfetto", "-"]):
        if message is None:
            assert out(capsys, "draw", path, *drawing)
        else:
            assert message in error(capsys, "draw", path, *drawing)


def test_an_unknown_command_or_placement_says_which_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert "'drow'; did you mean 'draw'?" in error(capsys, "drow", "1f1b")
    assert "known: list, draw, simulate, " in error(capsys, "zzz", "1f1b")
    assert "--microbatchs=3; did you mean --microbatches?" in error(capsys, "draw", "1f1b", "--microbatchs=3")
    assert "looped" in error(capsys, "verify", "some.csv", "--placement", "round")


@pytest.mark.parametrize("command", ["draw", "simulate", "verify"])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"0F0,0B0\n1F0,1B0x\n", "line 2 (rank 1), cell 2: '1B0x' is not an action: "),
        (b"", "the CSV is empty"),
        (b"0F0,0B0\n\n1F0,1B0\n", "line 2 is blank: each line is the row of a rank, so fill it or remove it"),
        (b"0F0,1F0,2F0\n0B0,1B0,2B0", "the CSV has 3 stages on 2 ranks"),
        (b"\xff\xfe\x00", "not a text file"),
    ],
)
def test_what_is_no_schedule_names_the_file_and_the_place(
    capsys: pytest.CaptureFixture[str], csv: Path, command: str, content: bytes, message: str
) -> None:
    csv.write_bytes(content)
    assert error(capsys, command, csv).startswith(f"{csv}: {message}")


def test_an_unsound_file_is_neither_drawn_nor_simulated(capsys: pytest.CaptureFixture[str], csv: Path) -> None:
    csv.write_text("0F0,0B0\n1F0\n", encoding="utf-8")
    for command in ("draw", "simulate"):
        assert error(capsys, command, csv) == (
            f"{csv} is unsound, 1 violation, the first: rank 1: 1B0 is missing: stage 1 runs 1F0 for microbatch 0; "
            "see pipeflow verify"
        )


def test_a_byte_order_mark_and_windows_line_ends_are_read(capsys: pytest.CaptureFixture[str], csv: Path) -> None:
    csv.write_bytes(b"\xef\xbb\xbf0F0,0B0\r\n1F0,1B0\r\n")
    assert "is sound" in out(capsys, "verify", csv)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["--version"])
    assert stopped.value.code == 0
    assert capsys.readouterr().out == f"pipeflow {__version__}\n"


@pytest.mark.slow
def test_a_reader_that_goes_away_is_no_error() -> None:
    argv = [sys.executable, "-m", "pipeflow", "export", "gpipe", "--ranks", "32", "--microbatches", "512", "--csv", "-"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(1)
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141


@pytest.mark.parametrize(
    ("argv", "meant"),
    [
        ("draw interleaved", "'interleaved-1f1b'"),
        ("draw ScheduleInterleavedZeroBubble", "'interleaved-zb'"),
        ("draw zero-bubble", "'zb-h1' or 'zb-v'"),
        ("simulate zerobubble", "'zb-h1' or 'zb-v'"),
        ("compare TrainSchedule", "'1f1b'"),
        ("draw forward_backward_pipelining_with_interleaving", "'interleaved-1f1b'"),
        ("draw --num-layers-per-virtual-pipeline-stage 2", "the schedule 'interleaved-1f1b'"),
        ("plan gpt2", "'gpt2-small'"),
    ],
)
def test_names_of_others_lead_to_ours(capsys: pytest.CaptureFixture[str], argv: str, meant: str) -> None:
    assert f"; did you mean {meant}?" in error(capsys, *argv.split())


def test_the_word_help_is_the_option(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["help"], ["help", "draw"]):
        with pytest.raises(SystemExit, match="0"):
            main(words)
        assert capsys.readouterr().out.startswith(f"usage: pipeflow {words[1] if len(words) > 1 else '[-h]'}")
