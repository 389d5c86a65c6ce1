"""Search beside the named schedules: how much shorter is a span, how far from best can it be, how long does it take?

First the published figures of the zero-bubble paper's own search, then 16 ranks of which one is slower, then scale.
"""

from __future__ import annotations

import time
from math import inf
from typing import NamedTuple

from benchmarks.report import Report
from pipeflow import SCHEDULES, CostModel, Placement, make_schedule, simulate
from pipeflow.schedules.order_search import search
from pipeflow.schedules.orders.search import Found

Costs = tuple[float, ...]  # F, I, W of one microbatch on a rank, and a transfer


class Published(NamedTuple):
    """A row of tables 5 and 6 of arXiv 2401.10241: costs in ms, and the bubble rates of ZB-1p and ZB-2p. Their caps are
    the activations of 1 and 2 microbatches per rank. Of an activation of 34 * hidden + 5 * heads * SEQUENCE bytes a
    waiting weight-gradient half holds 32 * hidden (all bytes per token and layer).
    """

    model: str
    ranks: int
    microbatches: int
    costs: Costs
    hidden: int
    heads: int
    single: float
    double: float

    @property
    def saved(self) -> int:
        """Bytes of an activation."""
        return 34 * self.hidden + 5 * self.heads * SEQUENCE

    @property
    def deferred(self) -> int:
        """Bytes of a waiting weight-gradient half."""
        return 32 * self.hidden


SEQUENCE = 1024
PUBLISHED = (
    Published("1.5B", 8, 24, (18.522, 18.086, 9.337, 0.601), 2304, 24, 0.1585, 0.0433),
    Published("1.5B", 8, 32, (18.513, 18.086, 9.331, 0.626), 2304, 24, 0.1242, 0.0039),
    Published("1.5B", 8, 64, (18.546, 18.097, 9.321, 0.762), 2304, 24, 0.0674, 0.0026),
    Published("6.2B", 8, 24, (29.718, 29.444, 19.927, 0.527), 4096, 32, 0.1323, 0.0029),
    Published("6.2B", 8, 32, (29.802, 29.428, 19.530, 0.577), 4096, 32, 0.1045, 0.0022),
    Published("6.2B", 8, 64, (29.935, 29.621, 19.388, 0.535), 4096, 32, 0.0554, 0.0010),
    Published("14.6B", 16, 48, (11.347, 11.248, 8.132, 0.377), 5120, 40, 0.1397, 0.0066),
    Published("14.6B", 16, 64, (11.307, 11.254, 8.101, 0.379), 5120, 40, 0.1088, 0.0054),
    Published("14.6B", 16, 128, (11.325, 11.308, 8.109, 0.378), 5120, 40, 0.0576, 0.0028),
    Published("28.3B", 32, 96, (10.419, 10.207, 7.715, 0.408), 6144, 48, 0.1421, 0.0038),
    Published("28.3B", 32, 128, (10.408, 10.204, 7.703, 0.408), 6144, 48, 0.1106, 0.0029),
    Published("28.3B", 32, 256, (10.402, 10.248, 7.698, 0.460), 6144, 48, 0.0594, 0.0018),
)
RANKS, MICROBATCHES, SLOWER, BUDGET = 16, 64, 1.5, 10.0
LARGE = 64, 256
COSTS: dict[str, Costs] = {"F=I=W": (1.0, 1.0, 1.0, 0.0), "1.5B": (18.546, 18.097, 9.321, 0.762)}
COLUMNS = ("", "named", "any", "search", "gap %", "on a V", "gap %", "< named %", "< any %", "s")


def run(rounds: int | None = None) -> Report:
    """`rounds` is not used: the candidates of a search do not depend on chance."""
    report = Report("search", "search: spans, beside the best named schedule within the same memory", COLUMNS)
    for row in PUBLISHED:
        for factor in (1, 2):
            _add_published(report, row, factor)
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
        "caps count activations until I ends; in rows of bytes, as in the paper, what waiting weight-gradient halves "
        "hold counts, too",
        f"each search has {BUDGET:g} s and ends sooner when it meets the lower bound; s: of both together (in the "
        "paper's rows of CPU time)",
    ]
    return report


def _add_published(report: Report, row: Published, factor: int) -> None:
    """Under the paper's own cap, which is in bytes, and under one that counts as many activations until I ends."""
    placement = Placement.linear(row.ranks)
    cost = CostModel.even(placement, *row.costs, saved_bytes=row.saved, deferred_bytes=row.deferred)
    published = (row.single, row.double)[factor - 1]
    most = factor * row.ranks
    for unit, activations, in_bytes in (("bytes", None, most * row.saved), ("activations", most, None)):
        start = time.process_time()
        found = search(
            placement,
            row.microbatches,
            cost,
            objective="span",
            memory_cap=activations,
            bytes_cap=in_bytes,
            budget=BUDGET,
        )
        seconds = time.process_time() - start
        rate = found.timeline.bubble_ratio
        label = f"{row.model}, p {row.ranks}, m {row.microbatches}, ZB-{factor}p, {unit}: rate"
        gap = f"{100 * found.gap:.2f}"
        report.rows.append([label, f"{published:.4f}", "", f"{rate:.4f}", gap, "", "", "", "", f"{seconds:.1f}"])
        report.data.setdefault("published", []).append(
            {"case": label, "published": published, "rate": rate, "gap": found.gap, "seconds": seconds}
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
    cost = _costs(placement, costs, slow)
    return search(placement, MICROBATCHES, cost, objective="span", memory_cap=cap, budget=BUDGET)


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
