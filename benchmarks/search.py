"""Search beside the named schedules: how much shorter is a span, how far from best can it be, how long does it take?

First the published figures of the zero-bubble paper's own search, then 16 ranks of which one is slower, then scale.
"""

from __future__ import annotations

import time
from math import inf

from benchmarks.report import Report
from pipeflow import SCHEDULES, CostModel, Placement, make_schedule, simulate
from pipeflow.orders.search import Found, search

PUBLISHED = (  # arXiv 2401.10241, tables 5 and 6: microbatches, F, I, W, transfer; bubble rates of ZB-1p and ZB-2p
    ("1.5B", 24, 18.522, 18.086, 9.337, 0.601, 0.1585, 0.0433),
    ("1.5B", 64, 18.546, 18.097, 9.321, 0.762, 0.0674, 0.0026),
    ("6.2B", 24, 29.718, 29.444, 19.927, 0.527, 0.1323, 0.0029),
    ("6.2B", 64, 29.935, 29.621, 19.388, 0.535, 0.0554, 0.0010),
)
RANKS, MICROBATCHES, SLOWER, BUDGET = 16, 64, 1.5, 10.0
LARGE = 64, 256
Costs = tuple[float, ...]  # F, I, W of one microbatch on a rank, and a transfer
COSTS: dict[str, Costs] = {"F=I=W": (1.0, 1.0, 1.0, 0.0), "1.5B": (18.546, 18.097, 9.321, 0.762)}
COLUMNS = ("", "named", "any", "search", "gap %", "on a V", "gap %", "< named %", "< any %", "s")


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
    report.notes += [
        "named: the shortest named schedule of one stage a rank that keeps within the cap (in the paper's rows the "
        "bubble rate of ZB-1p or ZB-2p); any: of any placement with one copy of the weights",
        "search: zb-auto's placement, one stage a rank; gap: how much longer than its proved lower bound it may be",
        "< named: how much shorter than it the search is; < any: how much shorter the better search is",
        f"target: {RANKS} ranks, 5 % shorter than named; where a gap is 0 no order on that placement is shorter",
        "caps count activations until I ends; the paper's limits count what waiting weight-gradient halves hold, too",
        f"each search has {BUDGET:g} s and ends sooner when it meets the lower bound; s: of both together",
    ]
    return report


def _add_published(report: Report, row: tuple[str, int, float, float, float, float, float, float], cap: int) -> None:
    model, microbatches, *costs, single, double = row
    placement = Placement.linear(8)
    start = time.perf_counter()
    cost = CostModel.even(placement, *costs)
    found = search(placement, microbatches, cost, objective="span", memory_cap=cap, budget=BUDGET)
    seconds = time.perf_counter() - start
    rate = 1 - microbatches * sum(costs[:3]) / found.timeline.span
    published = single if cap == 8 else double
    label = f"{model}, p 8, m {microbatches}, cap {cap}: rate"
    gap = f"{100 * found.gap:.2f}"
    report.rows.append([label, f"{published:.4f}", "", f"{rate:.4f}", gap, "", "", "", "", f"{seconds:.1f}"])
    report.data.setdefault("published", []).append(
        {"case": label, "published": published, "rate": rate, "gap": found.gap}
    )


def _add_slow(report: Report, label: str, costs: Costs, cap: float, slow: int) -> None:
    named = {name: _named(name, costs, slow, cap) for name in NAMED}
    same = min(named[name] for name in NAMED if _placement(name) == Placement.linear(RANKS))
    every = min(named.values())
    start = time.perf_counter()
    linear, vee = (_searched(place, costs, slow, cap) for place in (Placement.linear(RANKS), Placement.vee(RANKS)))
    seconds = time.perf_counter() - start
    best = min(linear.timeline.span, vee.timeline.span)
    case = f"rank {slow} slow, cap {cap:g}, {label}"
    report.rows.append(
        [
            case,
            "none" if same == inf else f"{same:.1f}",
            f"{every:.1f}",
            *(cell for found in (linear, vee) for cell in (f"{found.timeline.span:.1f}", f"{100 * found.gap:.2f}")),
            "" if same == inf else f"{100 * (1 - linear.timeline.span / same):.1f}",
            f"{100 * (1 - best / every):.1f}",
            f"{seconds:.1f}",
        ]
    )
    record = {"case": case, "named": {name: span for name, span in named.items() if span < inf}, "seconds": seconds}
    for place, found in (("linear", linear), ("vee", vee)):
        record[place] = {"span": found.timeline.span, "lower bound": found.lower_bound, "gap": found.gap}
    report.data.setdefault("slow", []).append(record)


def _placement(name: str) -> Placement:
    return make_schedule(name, ranks=RANKS, microbatches=1).placement


NAMED = [name for name in SCHEDULES if name != "zb-auto" and len(_placement(name).paths) == 1]


def _costs(placement: Placement, costs: Costs, slow: int) -> CostModel:
    """The costs of a rank, divided evenly among its chunks; those of the slow one are higher."""
    even = CostModel.even(placement, *costs)
    factors = [SLOWER if placement.rank_of(stage) == slow else 1.0 for stage in range(placement.num_stages)]
    forward, backward_input, backward_weight = (
        tuple(factor * time for factor, time in zip(factors, times, strict=True))
        for times in (even.forward, even.backward_input, even.backward_weight)
    )
    return CostModel(forward, backward_input, backward_weight, latency=even.latency)


def _named(name: str, costs: Costs, slow: int, cap: float) -> float:
    """The span of a named schedule, infinite where it needs more memory."""
    schedule = make_schedule(name, ranks=RANKS, microbatches=MICROBATCHES)
    timeline = simulate(schedule, _costs(schedule.placement, costs, slow))
    return timeline.span if max(timeline.peak_activations) <= cap else inf


def _searched(placement: Placement, costs: Costs, slow: int, cap: float) -> Found:
    fitting = [name for name in NAMED if _placement(name) == placement]
    start = [make_schedule(name, ranks=RANKS, microbatches=MICROBATCHES) for name in fitting]
    cost = _costs(placement, costs, slow)
    return search(placement, MICROBATCHES, cost, objective="span", memory_cap=cap, budget=BUDGET, start=start)


def _add_large(report: Report) -> None:
    ranks, microbatches = LARGE
    placement = Placement.linear(ranks)
    for label, costs in COSTS.items():
        start = time.perf_counter()
        cost = CostModel.even(placement, *costs)
        found = search(placement, microbatches, cost, objective="span", memory_cap=ranks, budget=BUDGET)
        seconds = time.perf_counter() - start
        case = f"p {ranks}, m {microbatches}, cap {ranks}, {label}"
        gap = f"{100 * found.gap:.2f}"
        report.rows.append([case, "", "", f"{found.timeline.span:.1f}", gap, "", "", "", "", f"{seconds:.1f}"])
        record = {"case": case, "span": found.timeline.span, "gap": found.gap, "seconds": seconds}
        report.data.setdefault("large", []).append(record)
