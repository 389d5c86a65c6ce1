"""Schedules that no generator made: halves of backwards, pairs, vee and bidirectional placements."""

from __future__ import annotations

import re
from collections.abc import Callable

from pipeflow.core.analysis.lowering import lower
from pipeflow.core.analysis.simulation import simulate
from pipeflow.core.cost import CostModel
from pipeflow.core.placement import Placement
from pipeflow.core.program import Recv, Send
from pipeflow.core.schedule import Schedule
from pipeflow.core.soundness.verification import verify
from pipeflow.core.timeline import Timeline

VEE = Placement.vee(2)
Sound = Callable[[Schedule], None]


def from_papers(placement: Placement, *rows: str) -> Schedule:
    """From the papers' notation: `F1.0` is microbatch 1 of chunk 0, B the input-gradient half, C a whole
    backward, (x&y) a pair."""

    def action(rank: int, text: str) -> str:
        letter, microbatch, chunk = re.fullmatch(r"([FBCW])(\d+)(?:\.(\d))?", text).groups()  # type: ignore[union-attr]
        stage = placement.stages_of(rank)[int(chunk or 0)]
        return f"{stage}{ {'B': 'I', 'C': 'B'}.get(letter, letter) }{microbatch}"

    def cell(rank: int, text: str) -> str:
        if not text.startswith("("):
            return action(rank, text)
        forward, backward = text.strip("()").split("&")
        return f"({action(rank, forward)};{action(rank, backward)})OVERLAP_F_B"

    lines = [",".join(cell(rank, text) for text in row.split()) for rank, row in enumerate(rows)]
    return Schedule.from_csv("\n".join(lines), placement, name="by hand")


def unit_passes(schedule: Schedule) -> Timeline:
    """Every pass through one chunk takes 1."""
    passes = schedule.placement.chunks_per_rank
    return simulate(schedule, CostModel.even(schedule.placement, passes, passes, passes))


def test_zb_v(require_sound: Sound) -> None:
    """Source: arXiv 2401.10241. For R=2, M=4 >= 2R-1 nothing is idle but the lead-in of rank 1."""
    schedule = from_papers(
        VEE,
        "F0.0 F1.0 F2.0 F0.1 B0.1 W0.1 F1.1 B1.1 W1.1 F3.0 B0.0 W0.0 F2.1 B2.1 W2.1 B1.0 W1.0 F3.1 B3.1 W3.1 "
        "B2.0 W2.0 B3.0 W3.0",
        "F0.0 F0.1 F1.0 F1.1 B0.1 W0.1 F2.0 B0.0 W0.0 F2.1 B1.1 W1.1 F3.0 B1.0 W1.0 F3.1 B2.1 W2.1 B2.0 B3.1 "
        "B3.0 W2.0 W3.1 W3.0",
    )
    require_sound(schedule)
    timeline = unit_passes(schedule)
    assert (timeline.makespan, timeline.span, timeline.bubble_ratio) == (25, 24, 0)
    assert timeline.peak_activations == (2, 2)


def dualpipe_v() -> Schedule:
    return from_papers(
        VEE,
        "F0.0 F1.0 F2.0 F0.1 B0.1 W0.1 F1.1 (F3.0&C1.1) (F2.1&C0.0) C2.1 (F3.1&C1.0) C3.1 B2.0 W2.0 B3.0 W3.0",
        "F0.0 F0.1 F1.0 F1.1 F2.0 C0.1 (F2.1&C0.0) (F3.0&C1.1) (F3.1&C1.0) C2.1 C2.0 B3.1 B3.0 W3.1 W3.0",
    )


def test_dualpipe_v_with_its_pairs(require_sound: Sound) -> None:
    """Bubble 2(R-1) passes when a pair takes the sum of its halves; peak 2R+1 chunks."""
    schedule = dualpipe_v()
    require_sound(schedule)
    timeline = unit_passes(schedule)
    assert timeline.makespan == 24 + 2
    assert [peak * 2 for peak in timeline.peak_activations] == [5, 5]


def test_a_pair_starts_when_both_halves_can_and_is_seen_when_whole() -> None:
    timeline = unit_passes(dualpipe_v())
    spans = {str(span.action): span for span in timeline}
    assert spans["3B1"].start == spans["0F3"].end
    assert spans["1F3"].start >= spans["3B1"].end  # not at the end of 0F3, with which 3B1 is paired


def test_a_vee_sends_nothing_to_itself() -> None:
    """Both middle stages are on the last rank, both ends on the first: only the outer edges are transfers."""
    for program in lower(dualpipe_v()):
        transfers = [step for step in program.instructions if isinstance(step, Send | Recv)]
        assert len(transfers) == 4 * 4  # 2 edges between the ranks, forwards and backwards, 4 microbatches
        assert all(step.peer == 1 - program.rank for step in transfers)


def test_a_bidirectional_schedule(require_sound: Sound) -> None:
    """Two 1F1B pipelines in opposite directions, one microbatch each: R=2 leaves no bubble but the fill."""
    schedule = Schedule.from_csv("0F0,1F1,1B1,0B0\n0F1,1F0,1B0,0B1", Placement.bidirectional(2), name="chimera")
    require_sound(schedule)
    timeline = unit_passes(schedule)
    assert (timeline.makespan, timeline.bubble_ratio) == (6, 0)
    assert verify(Schedule.from_csv(schedule.to_csv(), Placement.linear(2)))
