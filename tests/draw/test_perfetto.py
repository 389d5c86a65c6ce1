from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from itertools import pairwise
from typing import Any

import pytest

from pipeflow.core.dataflow import Stream, makes, needs
from pipeflow.core.errors import UsageError
from pipeflow.core.timeline import Timeline
from pipeflow.draw import perfetto
from tests.draw.samples import (
    HOSTILE,
    SAMPLES,
    exchanging,
    measured,
    paired,
    planned,
    reducing,
    with_bytes,
    with_transfers,
)

Event = dict[str, Any]
SMALL = {name: timeline for name, timeline in SAMPLES.items() if name != "dense"}


def events(*timelines: Timeline, factor: float = 1e6) -> list[Event]:
    trace = json.loads(perfetto(timelines, factor=factor))
    assert trace["displayTimeUnit"] in ("ms", "ns")
    found: list[Event] = trace["traceEvents"]
    return found


def of_phase(found: list[Event], phase: str) -> list[Event]:
    return [event for event in found if event["ph"] == phase]


def by_track(found: list[Event]) -> dict[tuple[int, int], list[Event]]:
    tracks = defaultdict(list)
    for event in of_phase(found, "X"):
        tracks[event["pid"], event["tid"]].append(event)
    return tracks


def sent(timeline: Timeline) -> int:
    """How many values pass from one rank to another."""
    stages = timeline.placement.num_stages
    maker = {value: span.rank for span in timeline for value in makes(span.action, stages)}
    return sum(maker[value] != span.rank for span in timeline for value in needs(span.action, stages))


@pytest.mark.parametrize("timeline", SMALL.values(), ids=SMALL)
def test_every_action_is_a_slice_and_slices_of_a_rank_do_not_overlap(timeline: Timeline) -> None:
    found = events(timeline)
    spans = timeline
    assert Counter(event["name"] for event in of_phase(found, "X")) == Counter(str(span.action) for span in spans)
    for track in by_track(found).values():
        for one, other in pairwise(track):
            assert one["ts"] + one["dur"] <= other["ts"]
        for event in track:
            assert event["dur"] >= 0
            assert event["ts"] * 1000 == int(event["ts"] * 1000)  # whole nanoseconds, as Perfetto counts


@pytest.mark.parametrize("timeline", SMALL.values(), ids=SMALL)
def test_times_never_go_back(timeline: Timeline) -> None:
    found = [event for event in events(timeline) if event["ph"] != "M"]
    assert all(one["ts"] <= other["ts"] for one, other in pairwise(found))
    assert all(event["ts"] >= 0 for event in found)


@pytest.mark.parametrize("timeline", SMALL.values(), ids=SMALL)
def test_arrows_have_two_ends_in_slices_of_two_ranks(timeline: Timeline) -> None:
    found = events(timeline)
    tracks = by_track(found)
    starts = {event["id"]: event for event in of_phase(found, "s")}
    ends = {event["id"]: event for event in of_phase(found, "f")}
    assert starts.keys() == ends.keys()
    assert len(starts) == len(of_phase(found, "s")) == len(of_phase(found, "f"))
    for number, start in starts.items():
        end = ends[number]
        assert end["bp"] == "e"
        assert start["tid"] != end["tid"]
        assert (start["cat"], start["name"]) == (end["cat"], end["name"])
        for event in (start, end):
            around = [
                slice_
                for slice_ in tracks[event["pid"], event["tid"]]
                if slice_["ts"] <= event["ts"] < slice_["ts"] + slice_["dur"]
            ]
            assert len(around) == 1
            assert found.index(around[0]) < found.index(event)


@pytest.mark.parametrize("timeline", [planned(), with_transfers(), paired(), measured()])
def test_every_transfer_is_an_arrow(timeline: Timeline) -> None:
    assert len(of_phase(events(timeline), "s")) == sent(timeline)


def test_an_arrow_leads_from_maker_to_user() -> None:
    found = events(planned("1f1b", 2, 1))
    slices = {event["name"]: event for event in of_phase(found, "X")}
    forward, back = (event for event in of_phase(found, "s"))
    assert (forward["name"], back["name"]) == ("activation", "gradient")
    assert forward["tid"] == slices["0F0"]["tid"]
    assert back["tid"] == slices["1B0"]["tid"]


def test_reductions_have_a_track_of_their_own_below_their_rank() -> None:
    timeline = reducing()
    found = events(timeline, planned())
    names = {(event["pid"], event["tid"]): event["args"]["name"] for event in found if event["name"] == "thread_name"}
    assert list(names.values()) == [
        *(f"rank {rank}" for rank in range(4)),
        *(f"rank {rank} reductions" for rank in range(4)),
        *(f"rank {rank}" for rank in range(4)),
    ]
    tracks = by_track(found)
    for rank, row in enumerate(timeline.on(Stream.REDUCE)):
        track = tracks[1, list(names)[4 + rank][1]]
        assert [event["name"] for event in track] == [str(span.action) for span in row]
    assert {names[key] for key, track in tracks.items() if "R" in track[0]["name"]} == set(list(names.values())[4:8])
    arrows = [event for event in of_phase(found, "s") if event["name"] == "weight gradient"]
    assert len(arrows) == 8


def test_slices_say_what_they_are() -> None:
    found = events(planned("interleaved-1f1b", 2, 2, chunks=2))
    event = next(event for event in found if event["name"] == "3B1")
    assert event["args"] == {"kind": "backward", "stage": 3, "chunk": 1, "microbatch": 1, "rank": 1}
    assert next(event for event in events(paired()) if event["name"] == "0F2")["args"]["overlapped with"] == "0B0"


def test_slices_say_how_long_they_wait_for_experts() -> None:
    name = "of which for tokens of experts"
    timeline = exchanging()
    told = {event["name"]: event["args"].get(name) for event in of_phase(events(timeline), "X")}
    assert told == {str(span.action): span.exchange or None for span in timeline}
    assert (told["0F0"], told["0W0"]) == (0.25, None)


def test_kinds_have_colours_of_their_own() -> None:
    """Perfetto takes the name without its digits, others `cname`."""
    looks = {(re.sub(r" ?\d+", "", event["name"]), event["cname"]) for event in of_phase(events(paired()), "X")}
    assert len(looks) == len(dict(looks)) == len({colour for _, colour in looks}) == 4


def test_times_are_microseconds() -> None:
    seconds = measured()
    ends = [event["ts"] + event["dur"] for event in of_phase(events(seconds), "X")]
    assert max(ends) == pytest.approx(seconds.makespan * 1e6, abs=0.125)
    ends = [event["ts"] + event["dur"] for event in of_phase(events(planned(), factor=1000), "X")]
    assert max(ends) == 33_000


def test_ranks_are_named_and_numbered_apart_in_all_processes() -> None:
    found = events(planned(), measured())
    names = {(event["pid"], event["tid"]): event["args"]["name"] for event in found if event["name"] == "thread_name"}
    assert list(names.values()) == [f"rank {rank}" for rank in range(4)] * 2
    threads = [thread for _, thread in names]
    processes = {process for process, _ in names}
    assert len({*threads, *processes}) == 8 + 2
    assert min(threads) > 0
    assert set(by_track(found)) == set(names)
    titles = [event["args"]["name"] for event in found if event["name"] == "process_name"]
    assert titles == ["1f1b, 4 ranks, 8 microbatches", "measured: 1f1b, 4 ranks, 6 microbatches"]
    order = [event["args"]["sort_index"] for event in found if event["name"] == "thread_sort_index"]
    assert order == [0, 1, 2, 3] * 2


@pytest.mark.parametrize(("timeline", "counted"), [(planned(), "activations"), (with_bytes(), "bytes")])
def test_memory_is_a_counter_per_rank(timeline: Timeline, counted: str) -> None:
    counters = of_phase(events(timeline, factor=1), "C")
    for rank in range(4):
        curve = [(event["ts"], event["args"][counted]) for event in counters if event["name"] == f"rank {rank}"]
        assert tuple(curve) == timeline.memory(rank)


def test_hostile_names_are_names() -> None:
    found = events(SAMPLES["hostile"])
    assert found[0]["args"]["name"].startswith(HOSTILE)


def test_one_timeline_needs_no_sequence() -> None:
    assert perfetto(planned()) == perfetto([planned()])
    with pytest.raises(UsageError, match="at least one timeline"):
        perfetto([])
