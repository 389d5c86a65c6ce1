"""Every headline counts the bubble in the makespan; the papers' bubble, of the span, is named as such beside it."""

from __future__ import annotations

import re

import pytest

from pipeflow import make_schedule, simulate
from tests.cli.run import out

SIZES = ["--ranks", 4, "--microbatches", 8]
TIMELINE = simulate(make_schedule("zb-h2", ranks=4, microbatches=8))
BUBBLE, OF_SPAN = f"{TIMELINE.makespan_bubble_ratio:.1%}", f"{TIMELINE.bubble_ratio:.1%}"


def test_the_two_differ_where_ranks_begin_one_after_the_other() -> None:
    assert (TIMELINE.work, TIMELINE.makespan, TIMELINE.span) == (24, 27, 24)
    assert (BUBBLE, OF_SPAN) == ("11.1%", "0.0%")


@pytest.mark.parametrize("command", ["draw zb-h2", "draw zb-h2 --svg -", "draw zb-h2 --html -", "diff zb-h2 zb-h2"])
def test_a_drawing_says_both(capsys: pytest.CaptureFixture[str], command: str) -> None:
    shown = out(capsys, *command.split(), *SIZES)
    assert re.search(rf"\bbubble {BUBBLE}\W+(</?span>)*bubble of span {OF_SPAN}", shown)
    assert not re.search(rf"\bbubble {OF_SPAN}", shown)


def test_tables_say_both(capsys: pytest.CaptureFixture[str]) -> None:
    shown = out(capsys, "compare", "zb-h2", "1f1b", *SIZES).partition("\n\n")[2]
    titles, above, row, *_ = [line.split("  ") for line in shown.splitlines()]
    assert "bubble" in [title.strip() for title in above]
    assert "of span" in [title.strip() for title in above]
    assert titles
    assert [cell.strip(" *") for cell in row if "%" in cell] == [BUBBLE, OF_SPAN]
    lines = out(capsys, "diff", "zb-h2", "1f1b", *SIZES).splitlines()
    found = {line.split("  ")[0]: line.split() for line in lines if line.startswith("bubble")}
    assert found["bubble"][1:3] == [BUBBLE, "27.3%"]
    assert found["bubble of span"][3:5] == [OF_SPAN, "27.3%"]
    page = out(capsys, "draw", "zb-h2", "--html", "-", *SIZES)
    assert f"<td>{BUBBLE}</td><td>{OF_SPAN}</td>" in page


def test_a_plan_counts_idle_time_as_its_bubble_does(capsys: pytest.CaptureFixture[str]) -> None:
    shown = out(capsys, "plan", "tiny", "--vocabulary", 1, "--schedule", "zb-h2", "--pipeline", 4)
    idle = [float(line.split()[-1].rstrip("%")) for line in shown.splitlines() if line[:1].isdigit() and "%" in line]
    bubble = re.search(r"\nbubble: ([\d.]+)% \(idle time of rank (\d), .*; bubble of span: ([\d.]+)%\n", shown)
    assert bubble is not None
    assert float(bubble[1]) == min(idle) == idle[int(bubble[2])]
    assert float(bubble[3]) < float(bubble[1])
