"""Search with offload and recomputation: makespans under caps on memory, beside those of PipeOffload's own scheduler.

F = I = W = 1 per stage and microbatch, and what a forward saved is kept until W has ended. A copy takes a part of
F + I + W each way, and ranks 2i and 2i + 1 share a link to their host.
"""

from __future__ import annotations

import time
from typing import NamedTuple

from benchmarks.report import Report
from pipeflow import CostModel, Kind, Placement, UsageError, simulate, verify
from pipeflow.schedules.order_search import search
from pipeflow.schedules.orders.search import Found
from pipeflow.schedules.orders.spilling import MemoryKind

CANDIDATES = 300
BOTH: tuple[MemoryKind, ...] = ("offload", "recompute")


class Case(NamedTuple):
    """Ranks, microbatches, chunks per rank, the time of a copy over F + I + W, and the most activations of a chunk that
    a rank may keep. `published` is the makespan of PipeOffload's code (the repository of zero-bubble pipeline
    parallelism at 39f2c18), and `must` is what a search must reach.
    """

    ranks: int
    microbatches: int
    chunks: int
    copy: float
    cap: int
    published: str
    must: int


TABLE = (
    Case(8, 32, 4, 0.5, 9, "486", 425),
    Case(8, 32, 4, 0.5, 16, "486 (at 9)", 412),
    Case(8, 32, 4, 0.5, 20, "", 398),
    Case(8, 16, 3, 0.5, 6, "207", 178),
    Case(8, 16, 2, 0.5, 6, "144", 119),
    Case(4, 16, 2, 0.5, 4, "120", 104),
)
REFUSED = (  # that code ends with an error; caps are what it reaches if a copy takes half as long, or two chunks go
    Case(4, 8, 2, 1.0, 4, "error, k 1", 72),
    Case(4, 8, 2, 1.0, 4, "error, k 2", 72),
    Case(4, 16, 2, 1.0, 4, "error, k 1", 120),
    Case(4, 16, 2, 1.0, 4, "error, k 2", 120),
    Case(8, 16, 2, 1.0, 6, "error, k 2", 144),
    Case(8, 16, 3, 1.0, 6, "error, k 2", 207),
    Case(8, 16, 3, 1.0, 6, "error, k 3", 207),
    Case(8, 32, 4, 0.5, 9, "error, k 4", 486),
    Case(8, 32, 4, 1.0, 10, "error, k 4", 486),
)
COLUMNS = (
    "ranks, microbatches, chunks",
    "copy",
    "cap",
    "PipeOffload",
    "must",
    "found",
    "bound",
    "C",
    "O",
    "peaks",
    "s",
)


def run(rounds: int | None = None) -> Report:
    """`rounds` is not used: the candidates of a search do not depend on chance."""
    report = Report("memory", "search with offload and recomputation: makespans within a cap", COLUMNS)
    for case in TABLE:
        _add(report, case, BOTH)
    for kind in BOTH:
        for case in TABLE[3:]:
            _add(report, case, (kind,))
    for case in REFUSED:
        _add(report, case, BOTH)
    report.notes += [
        "copy: its time over F + I + W; cap: activations of a chunk on each rank; k: that code offloads k chunks",
        "C, O: forwards computed again and offloads; bound: no order is shorter, whatever its memory",
        f"{CANDIDATES} candidates without and as many with these kinds; s: of CPU time",
        "must, in rows of an error: the makespan of that code without copies",
    ]
    return report


def costs(placement: Placement, copy: float) -> CostModel:
    """Unit costs, with copies of this part of F + I + W."""
    ones, ranks = (1.0,) * placement.num_stages, placement.num_ranks
    groups = tuple(tuple(range(first, min(first + 2, ranks))) for first in range(0, ranks, 2))
    times = (3 * copy,) * len(ones)
    return CostModel(ones, ones, ones, saved_bytes=ones, deferred_bytes=ones, offload=times, copy_groups=groups)


def searched(case: Case, kinds: tuple[MemoryKind, ...], candidates: int = CANDIDATES) -> Found:
    """The schedule that a search finds: verified, and simulated within the cap."""
    placement = Placement.looped(case.ranks, case.chunks)
    cost = costs(placement, case.copy)
    found = search(
        placement,
        case.microbatches,
        cost,
        bytes_cap=case.cap,
        kinds=kinds,
        budget=float("inf"),
        candidates=candidates,
    )
    timeline = simulate(found.schedule, cost)
    if verify(found.schedule) or timeline != found.timeline or max(timeline.peak_bytes) > case.cap:
        raise UsageError(f"the schedule that was found for {case} is not what the search says")
    return found


def _add(report: Report, case: Case, kinds: tuple[MemoryKind, ...]) -> None:
    start = time.process_time()
    found = searched(case, kinds)
    seconds = time.process_time() - start
    actions = [action.kind for rank in range(case.ranks) for action in found.schedule.actions(rank)]
    label = f"{case.ranks}, {case.microbatches}, {case.chunks}{'' if kinds == BOTH else f', {kinds[0]} alone'}"
    must = str(case.must) if kinds == BOTH else ""
    peak = f"{max(found.timeline.peak_bytes):g}"
    measured = (f"{found.timeline.makespan:g}", f"{found.lower_bound:g}")
    kinds_used = [str(actions.count(kind)) for kind in (Kind.C, Kind.O)]
    sizes = [label, f"{case.copy:g}", str(case.cap), case.published, must]
    report.rows.append([*sizes, *measured, *kinds_used, peak, f"{seconds:.1f}"])
    record = {"case": case._asdict(), "kinds": kinds, "makespan": found.timeline.makespan, "bound": found.lower_bound}
    report.data.setdefault("cases", []).append(record | {"seconds": seconds})
