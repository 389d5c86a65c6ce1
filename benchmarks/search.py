"""Search beside the named schedules: how much shorter is a span, how far from best can it be, how long does it take?

First the published figures of the zero-bubble paper's own search, then 16 ranks of which one is slower, then scale.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from math import inf

from benchmarks.report import Report
from pipeflow import SCHEDULES, CostModel, Placement, Schedule, make_schedule, simulate
from pipeflow.analysis.search import Found, search

PUBLISHED = (  # arXiv 2401.10241, tables 5 and 6: microbatches, F, I, W, transfer; bubble rates of ZB-1p and ZB-2p
    ("1.5B", 24, 18.522, 18.086, 9.337, 0.601, 0.1585, 0.0433),
    ("1.5B", 64, 18.546, 18.097, 9.321, 0.762, 0.0674, 0.0026),
    ("6.2B", 24, 29.718, 29.444, 19.927, 0.527, 0.1323, 0.0029),
    ("6.2B", 64, 29.935, 29.621, 19.388, 0.535, 0.0554, 0.0010),
)
RANKS, MICROBATCHES, SLOWER, BUDGET = 16, 64, 1.5, 10.0
COSTS = {"F=I=W, free transfers": (1.0, 1.0, 1.0, 0.0), "1.5B's": PUBLISHED[1][2:6]}  # of one microbatch on a rank
LARGE = 64, 256
COLUMNS = ("", "named", "named, any placement", "search", "search, vee", "shorter %", "than any %", "gap %", "s")


def run(rounds: int | None = None) -> Report:
    """`rounds` is not used: the candidates of a search do not depend on chance."""
    report = Report("search", "search: spans, beside the best named schedule within the same memory", COLUMNS)
    for row in PUBLISHED:
        for cap in (8, 16):
            _add_published(report, row, cap)
    for label, costs in COSTS.items():
        for cap in (RANKS, RANKS // 2):
            for slow in (0, 5, 10, 15):
                _add_slow(report, label, costs, cap, slow)
    _add_large(report)
    shares = [100 * scenario["shorter"] for scenario in report.data["slow"]]
    report.notes += [
        "named: the shortest of one stage a rank (in the paper's rows: the bubble rate of ZB-1p or ZB-2p); any: of all",
        "gap: how much longer than the proved lower bound the shorter of the two searches is, at most",
        f"target: 5 % shorter than the best named one on {RANKS} ranks; {sum(share >= 5 for share in shares)} of "
        f"{len(shares)} cases are, from {min(shares):.1f} to {max(shares):.1f} % (same placement)",
        f"a search has {BUDGET:g} s, and ends sooner when the lower bound is met; `s` counts both searches",
    ]
    return report


def _add_published(report: Report, row: tuple[str, int, float, float, float, float, float, float], cap: int) -> None:
    model, microbatches, *costs, single, double = row
    placement = Placement.linear(8)
    start = time.perf_counter()
    cost = CostModel.even(placement, *costs)
    found = search(placement, microbatches, cost, memory_cap=cap, budget=BUDGET)
    seconds = time.perf_counter() - start
    rate = 1 - microbatches * sum(costs[:3]) / found.timeline.span
    published = single if cap == 8 else double
    label = f"{model}, p 8, m {microbatches}, cap {cap}: bubble rate"
    cells = [label, f"{published:.4f}", "", f"{rate:.4f}", "", "", "", f"{100 * found.gap:.2f}", f"{seconds:.1f}"]
    report.rows.append(cells)
    report.data.setdefault("published", []).append({"case": label, "published": published, "rate": rate})


def _add_slow(report: Report, label: str, costs: Sequence[float], cap: float, slow: int) -> None:
    named = {name: _named(name, costs, slow, cap) for name in SCHEDULES if name != "zb-auto"}
    linear = [name for name in named if make_schedule(name, ranks=2, microbatches=2).placement == Placement.linear(2)]
    same, every = min(named[name] for name in linear), min(named.values())
    start = time.perf_counter()
    here, vee = (
        _searched(placement, costs, slow, cap) for placement in (Placement.linear(RANKS), Placement.vee(RANKS))
    )
    seconds = time.perf_counter() - start
    best = min(here, vee, key=lambda found: found.timeline.span)
    bound = min(here.lower_bound, vee.lower_bound)
    shorter, than_any = 1 - here.timeline.span / same, 1 - best.timeline.span / every
    case = f"slow {slow}, cap {cap:g}, {label}"
    spans = [f"{span:.1f}" if span < inf else "none" for span in (same, every, here.timeline.span, vee.timeline.span)]
    parts = [f"{100 * part:.1f}" for part in (shorter, than_any)]
    report.rows.append([case, *spans, *parts, f"{100 * (best.timeline.span / bound - 1):.2f}", f"{seconds:.1f}"])
    report.data.setdefault("slow", []).append(
        {
            "case": case,
            "named": named,
            "linear": [here.timeline.span, here.lower_bound],
            "vee": [vee.timeline.span, vee.lower_bound],
            "shorter": shorter,
            "than any": than_any,
        }
    )


def _costs(placement: Placement, costs: Sequence[float], slow: int) -> CostModel:
    """The costs of a rank, divided evenly among its chunks; those of the slow one are higher."""
    even = CostModel.even(placement, *costs)
    factors = [SLOWER if placement.rank_of(stage) == slow else 1.0 for stage in range(placement.num_stages)]
    forward, backward_input, backward_weight = (
        tuple(factor * time for factor, time in zip(factors, times, strict=True))
        for times in (even.forward, even.backward_input, even.backward_weight)
    )
    return CostModel(forward, backward_input, backward_weight, latency=even.latency)


def _named(name: str, costs: Sequence[float], slow: int, cap: float) -> float:
    """The span of a named schedule, infinite where it needs more memory."""
    schedule = make_schedule(name, ranks=RANKS, microbatches=MICROBATCHES)
    timeline = simulate(schedule, _costs(schedule.placement, costs, slow))
    return timeline.span if max(timeline.peak_activations) <= cap else inf


def _searched(placement: Placement, costs: Sequence[float], slow: int, cap: float) -> Found:
    cost = _costs(placement, costs, slow)
    start: list[Schedule] = [
        make_schedule(name, ranks=RANKS, microbatches=MICROBATCHES) for name in SCHEDULES if name != "zb-auto"
    ]
    fitting = [schedule for schedule in start if schedule.placement == placement]
    return search(placement, MICROBATCHES, cost, memory_cap=cap, budget=BUDGET, start=fitting)


def _add_large(report: Report) -> None:
    ranks, microbatches = LARGE
    placement = Placement.linear(ranks)
    for label, costs in COSTS.items():
        start = time.perf_counter()
        cost = CostModel.even(placement, *costs)
        found = search(placement, microbatches, cost, memory_cap=ranks, budget=BUDGET)
        seconds = time.perf_counter() - start
        case = f"{ranks} ranks, {microbatches} microbatches, {label}"
        cells = [case, "", "", f"{found.timeline.span:.1f}", "", "", "", f"{100 * found.gap:.2f}", f"{seconds:.1f}"]
        report.rows.append(cells)
        report.data.setdefault("large", []).append({"case": case, "span": found.timeline.span, "seconds": seconds})
