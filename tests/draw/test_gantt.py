from __future__ import annotations

import io
import re
from dataclasses import replace
from typing import Literal

import pytest
from rich.console import Console, RenderableType

from pipeflow.core.action import Kind
from pipeflow.core.analysis.simulation import simulate
from pipeflow.core.cost import CostModel
from pipeflow.core.schedule import Schedule
from pipeflow.core.timeline import Span, Timeline
from pipeflow.draw import Comparison, CriticalPath, Gantt
from pipeflow.draw.colours import HUES
from pipeflow.schedules import make_schedule
from tests.draw.samples import planned, reducing

Colours = Literal["standard", "truecolor"]


def draw(
    renderable: RenderableType, width: int = 80, *, colours: Colours | None = None, encoding: str = "utf-8"
) -> str:
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    console = Console(file=file, width=width, force_terminal=bool(colours), color_system=colours, _environ={})
    console.print(renderable)
    file.seek(0)
    return file.read()


def test_what_is_too_dense_for_blocks_has_average_colours_and_a_line_says_so() -> None:
    timeline = planned("1f1b", 2, 400)
    whole = draw(Gantt(planned("interleaved-1f1b", 4, 200), memory=False), colours="truecolor").splitlines()
    assert [len(re.findall("48;2;", line)) > 60 for line in whole if "rank " in line] == [True] * 4
    lines = draw(Gantt(timeline, memory=False), colours="truecolor").splitlines()
    assert lines[-1] == "Columns hold several actions and show their average colour, greyer where idle."
    row = next(line for line in lines if "rank 1" in line)
    colours = [tuple(map(int, found)) for found in re.findall(r"48;2;(\d+);(\d+);(\d+)", row)]
    steady = colours[5:-5]
    forward, backward = (HUES[kind].rgb for kind in (Kind.F, Kind.B))
    for part in range(3):
        wanted = (forward[part] + 2 * backward[part]) / 3
        assert all(abs(colour[part] - wanted) < 10 for colour in steady)  # a steady state has one colour: no moire
    for shown in (draw(Gantt(timeline)), draw(Gantt(timeline), colours="standard")):
        assert shown.splitlines()[-1].endswith("of one of them, in turn.")
    assert "Columns hold" not in draw(Gantt(planned()))


def slower(timeline: Timeline, factor: float) -> Timeline:
    rows = tuple(
        tuple(Span(span.action, span.rank, span.start * factor, span.end * factor) for span in row)
        for row in timeline.rows
    )
    return Timeline(timeline.name, timeline.placement, rows)


def test_1f1b_at_80_columns() -> None:
    assert (
        draw(Gantt(planned()))
        == """\
1f1b, 4 ranks, 8 microbatches
        0         5         10        15        20        25        30
rank 0  F0F1F2F3............B0- F4B1- F5B2- F6B3- F7B4- ..B5- ..B6- ..B7-
peak 4  1 2 3 4                                         3     2     1
rank 1  ..F0F1F2........B0- F3B1- F4B2- F5B3- F6B4- F7B5- ..B6- ..B7- ....
peak 3    1 2 3                                           2     1     0
rank 2  ....F0F1....B0- F2B1- F3B2- F4B3- F5B4- F6B5- F7B6- ..B7- ........
peak 2      1 2                                             1     0
rank 3  ......F0B0- F1B1- F2B2- F3B3- F4B4- F5B5- F6B6- F7B7- ............
peak 1        1                                               0
makespan 33  bubble 27.3%  peak activations 4 3 2 1

F forward   B backward   . idle   1-4 activations kept
"""
    )


def test_lower_case_is_the_second_chunk() -> None:
    assert (
        draw(Gantt(planned("interleaved-1f1b", 2, 2), memory=False), 60)
        == """\
interleaved-1f1b, 2 ranks, 2 chunks, 2 microbatches
        0           2           4           6
rank 0  F0 F1 f0 f1 ......b0--- ...b1--- B0--- B1---
rank 1  ...F0 F1 f0 b0--- f1 b1--- B0--- B1--- ......
makespan 7.5  bubble 20.0%  peak activations 2 1.5

F forward   B backward   lower case: chunk 1   . idle
"""
    )


def test_with_more_chunks_actions_say_their_stage() -> None:
    drawing = draw(Gantt(planned("interleaved-1f1b", 1, 2, chunks=3)), 80)
    assert "rank 0  0F0 1F0 2F0 2B0---- 0F1 1B0---- 1F1 0B0---- 2F1 2B1---- 1B1---- 0B1----\n" in drawing
    assert "4F0: stage 4, microbatch 0" in drawing


def test_halves_have_letters_and_names_of_their_own() -> None:
    drawing = draw(Gantt(simulate(Schedule.from_csv("0F0,0I0,0W0")), memory=False))
    assert re.search(r"rank 0  F0-+ I0-+ W0-+\n", drawing)
    assert drawing.endswith("F forward   I input gradient   W weight gradient   . idle\n")


def test_the_span_is_said_where_it_is_not_the_makespan() -> None:
    forward = make_schedule("1f1b", ranks=2, microbatches=4).forward_only()
    assert "makespan 5  span 4  bubble 20.0%  bubble of span 0.0%\npeak" in draw(Gantt(simulate(forward)))


def test_reductions_have_lines_of_their_own_and_are_summed_up() -> None:
    schedule = make_schedule("interleaved-1f1b", ranks=2, microbatches=2).with_reductions()
    timeline = simulate(schedule, CostModel.even(schedule.placement, reduce=6))
    assert (
        draw(Gantt(timeline, memory=False, unit="ms"), 60)
        == """\
interleaved-1f1b, 2 ranks, 2 chunks, 2 microbatches
            0 ms                5                   10
rank 0      F0F1f0f1....b0- ..b1- B0- B1- ................
reductions                        r1--------- R1---------
rank 1      ..F0F1f0b0- f1b1- B0- B1- ....................
reductions                    r1--------- R1---------
makespan 11.5 ms  reductions 6 ms, exposed 4 ms
bubble 47.8%  peak activations 2 1.5

F forward   B backward   R gradient reduction
lower case: chunk 1   . idle
"""
    )


def test_reductions_are_half_a_line_high_where_there_are_colours() -> None:
    lines = draw(Gantt(reducing(reduce=4), memory=False), colours="truecolor").splitlines()
    plain = [re.sub(r"\x1b\[[\d;]*m", "", line) for line in lines]
    assert all("\u2584" in line for line in plain if line.startswith("reductions "))
    assert any("\u2584\u2584 gradient reduction" in line for line in plain)
    assert "gradient reduction" not in draw(Gantt(reducing(reduce=0)))


@pytest.mark.parametrize("width", [12, 80, 300])
@pytest.mark.parametrize("colours", [None, "truecolor"])
@pytest.mark.parametrize(("ranks", "microbatches", "chunks"), [(1, 1, 1), (1, 40, 2), (4, 8, 4), (12, 40, 2)])
def test_nothing_is_wrapped_and_every_rank_has_a_line(
    width: int, colours: Colours | None, ranks: int, microbatches: int, chunks: int
) -> None:
    drawing = draw(Gantt(planned("interleaved-1f1b", ranks, microbatches, chunks=chunks)), width, colours=colours)
    lines = re.sub(r"\x1b\[[\d;]*m", "", drawing).splitlines()
    assert max(map(len, lines)) <= width
    assert [line.split()[1] for line in lines if line.startswith("rank ")] == [str(rank) for rank in range(ranks)]


def test_plain_drawings_are_ascii_without_escapes() -> None:
    drawing = draw(Comparison(planned(), slower(planned(), 1.1)))
    assert drawing.isascii()
    assert "\x1b" not in drawing


def test_colours_need_a_terminal_that_can_show_them() -> None:
    assert "\x1b[" in draw(Gantt(planned()), colours="truecolor")
    assert draw(Gantt(planned()), colours="truecolor", encoding="ascii").isascii()


def test_every_kind_and_chunk_has_a_colour_of_its_own() -> None:
    halves = Schedule.from_csv("0F0,1F0,1B0,0I0,0W0,0F1,1F1,1I1,1W1,0B1")
    backgrounds = set(re.findall(r"48;2;\d+;\d+;\d+", draw(Gantt(simulate(halves)), 120, colours="truecolor")))
    assert len(backgrounds) == 4 * 2


def test_16_colours_tell_the_kinds_and_the_second_chunk_apart() -> None:
    halves = Schedule.from_csv("0F0,1F0,1B0,0I0,0W0,0F1,1F1,1I1,1W1,0B1")
    backgrounds = set(re.findall(r";(\d+)m", draw(Gantt(simulate(halves)), 120, colours="standard")))
    assert backgrounds == {"44", "42", "45", "43", "104", "102", "105", "103"}


def test_a_drawing_that_is_scaled_down_keeps_the_proportions() -> None:
    row = next(line for line in draw(Gantt(planned("1f1b", 8, 400)), 208).splitlines() if line.startswith("rank 7"))
    shown = row.removeprefix("rank 7  ")
    assert shown.count("B") == pytest.approx(2 * shown.count("F"), abs=3)
    assert "FF" not in shown
    assert 2 <= shown.count(".") <= 5  # 14 of 1221 units of time, in 200 columns


def test_kinds_alternate_also_when_there_are_chunks() -> None:
    drawing = draw(Gantt(planned("interleaved-1f1b", 2, 300, chunks=3)), 60)
    assert "FBBFBBFBBFBBFBBFBBFBB" in drawing


def test_a_comparison_has_one_time_scale() -> None:
    drawing = draw(Comparison(planned(), slower(planned(), 2)), 140)
    rows = [line for line in drawing.splitlines() if line.startswith("rank 0")]
    assert len(rows) == 2
    assert [len(row) for row in rows] == [len("rank 0  ") + 33 * columns - 1 for columns in (2, 4)]


def test_a_comparison_says_the_measures_of_both() -> None:
    measured = slower(planned("gpipe", 2, 4), 0.013)
    lines = draw(Comparison(planned("1f1b", 2, 4), measured, unit="ms", factor=1000), 100).splitlines()
    assert lines[0] == "planned: 1f1b, 2 ranks, 4 microbatches"
    assert "measured: gpipe, 2 ranks, 4 microbatches" in lines
    assert "makespan 15000 ms  bubble 20.0%  peak activations 2 1" in lines
    assert "makespan 195 ms  bubble 20.0%  peak activations 4 on every rank" in lines
    assert lines[-2:] == [
        "F forward   B backward   . idle   1-4 activations kept",
        "Columns hold several actions and show the letter of one of them, in turn.",
    ]


def test_times_are_in_the_unit_of_the_caller() -> None:
    drawing = draw(Gantt(slower(planned(), 0.001), unit="ms", factor=1000))
    assert "        0 ms      5         10        15 " in drawing
    assert "makespan 33 ms " in drawing


def test_irregular_times_fill_the_width() -> None:
    schedule = make_schedule("1f1b", ranks=2, microbatches=4)
    cost = CostModel((0.91, 1.13), (1.07, 0.83), (0.71, 1.31), latency=0.05)
    rows = [line for line in draw(Gantt(simulate(schedule, cost)), 100).splitlines() if line.startswith("rank")]
    assert all(95 <= len(row) <= 100 for row in rows)


def test_peaks_of_many_ranks_are_summed_up() -> None:
    assert "peak activations 12 (rank 0) to 1 (rank 11)" in draw(Gantt(planned("1f1b", 12, 20)))


def test_a_timeline_without_spans_is_drawn() -> None:
    empty = planned(ranks=2)
    assert "rank 1" in draw(Gantt(Timeline("empty", empty.placement, ((), ()))))


def test_a_timeline_in_which_nothing_takes_time_is_drawn() -> None:
    schedule = make_schedule("1f1b", ranks=2, microbatches=2)
    assert "makespan 0 " in draw(Gantt(simulate(schedule, CostModel.even(schedule.placement, 0, 0, 0))))


def test_spans_that_overlap_are_cut() -> None:
    first, *rest = planned("1f1b", 1, 2).rows[0]
    late = Span(first.action, 0, first.start, first.end + 0.5)
    drawing = draw(Gantt(Timeline("overlapping", planned(ranks=1).placement, ((late, *rest),))), 80)
    assert next(line for line in drawing.splitlines() if line.startswith("rank 0")).split()[2][:2] == "F0"
    assert max(map(len, drawing.splitlines())) <= 80


def test_pairs_are_joined() -> None:
    paired = simulate(Schedule.from_csv("0F0,(0F1;0B0)OVERLAP_F_B,0B1\n1F0,1B0,1F1,1B1"))
    assert "F1---+B0--------- ..................B1" in draw(Gantt(paired))
    narrow = draw(Gantt(paired), 35)
    assert "F+B0- " in narrow  # no room for the forward's number
    assert "+ pair, overlapped" in narrow
    assert "\x1b[38;2;16;20;28;48;2;96;146;240m+\x1b" in draw(Gantt(paired), colours="truecolor")
    assert "pair" not in draw(Gantt(planned()))


def memory_lines(drawing: str, margin: int = 8) -> list[str]:
    plain = re.sub(r"\x1b\[[\d;]*m", "", drawing)
    return [line[margin:] for line in plain.splitlines() if re.match(r"peak \d", line)]


def test_memory_is_drawn_to_the_scale_of_the_highest_peak() -> None:
    bars = memory_lines(draw(Gantt(planned("1f1b", 4, 8)), colours="truecolor"))
    assert [max(line.rstrip()) for line in bars] == ["\u2588", "\u2586", "\u2584", "\u2582"]  # 4, 3, 2, 1 of 4


def test_a_digit_says_how_much_is_kept_from_there_on() -> None:
    sixteen = simulate(make_schedule("gpipe", ranks=1, microbatches=16))
    assert "1-9 activations kept, 9 is 16" in draw(Gantt(sixteen), 200)
    (line,) = memory_lines(draw(Gantt(sixteen), 200), 9)
    assert line.replace(" ", "") == "1234567898765432" + "1" * ("1" in line[-8:])
    assert "1-6 activations kept, rounded up" in draw(Gantt(planned("interleaved-1f1b")))


def test_a_short_peak_is_seen_in_a_drawing_that_is_scaled_down() -> None:
    short = Schedule.from_csv(",".join(["0F0,0B0"] + [f"0F{m},0B{m}" for m in range(1, 99)]) + ",0F99,0F100,0B99,0B100")
    (line,) = memory_lines(draw(Gantt(simulate(short)), 40))
    assert "2" in line


def test_bytes_are_drawn_where_they_are_known_for_all() -> None:
    schedule = make_schedule("1f1b", ranks=2, microbatches=4)
    known = simulate(schedule, CostModel.even(schedule.placement, saved_bytes=3 * 2**29))
    assert "peak 3 GiB" in draw(Gantt(known))
    assert "memory kept, 9 is 3 GiB" in draw(Gantt(known))
    assert "peak 2  " in draw(Comparison(known, simulate(schedule)))


def test_the_legend_breaks_between_its_items() -> None:
    lines = draw(Gantt(planned("interleaved-1f1b")), 50).splitlines()
    assert lines[-2:] == ["F forward   B backward   lower case: chunk 1", ". idle   1-6 activations kept, rounded up"]


@pytest.mark.parametrize(("factor", "written"), [(1, "33 s"), (1e-3, "33 ms"), (1e-5, "330 us"), (10, "330 s")])
def test_times_in_seconds_have_a_unit_that_people_read(factor: float, written: str) -> None:
    timeline = replace(slower(planned(), factor), unit="s")
    for drawing in (Gantt(timeline), CriticalPath(timeline), Comparison(timeline, timeline)):
        assert written in draw(drawing)
    assert f"makespan {33e3 * factor:g} ms" in draw(Gantt(timeline, unit="ms"))
    assert f"makespan {33 * factor:.4g}  " in draw(Comparison(timeline, replace(timeline, unit="")))
