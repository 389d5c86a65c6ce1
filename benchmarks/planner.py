"""The planner beside published training steps: its error, its ranking of layouts and their regret, with its own
coefficients and with those that are fitted without the rows that they predict. It takes minutes, for the fits. With
--save it also writes the table of docs/planning.md.
"""

from __future__ import annotations

import csv
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import product, starmap
from statistics import fmean, median
from typing import Any, NamedTuple

import numpy as np

from benchmarks.measured_steps import DATA, MeasuredBytes, Row, memory_commands, memory_rows, rows
from benchmarks.planner_fit import fitted, fitted_without, own_coefficients
from benchmarks.planner_tables import write_tables
from benchmarks.regret import regrets
from benchmarks.report import Report
from pipeflow.planning.rank_memory import ALLOCATOR
from pipeflow.planning.similar import Kind, kind_of

COLUMNS = ["", "rows", "mean error", "largest", "bias", "rank corr.", "regret", "largest", "regret without ties"]
GROUPED = "llm-foundry-a100"
STUDENT = (6.31, 2.92, 2.35, 2.13, 2.02, 1.94, 1.89, 1.86, 1.83, 1.81, 1.80, 1.78)
"""Within so many spreads are nine of ten, by degrees of freedom."""
POOLED = 4  # publishers for which the errors of all kinds of jobs count beside those of a kind
NEAR = 0.5  # of a publisher that measured only kinds that are near
LOGS = DATA.with_name("allocator_logs.csv")


def run(rounds: int | None = None) -> Report:
    every = rows()
    sources = list(dict.fromkeys(row.source for row in every))
    report = Report("planner", "planner: predicted and published seconds of training steps", COLUMNS)
    report.data["errors"] = {}
    for source in sources:
        _add(report, f"{source}", _of(every, source), own_coefficients())
    start = fitted(every)
    names = [*dict.fromkeys(map(group, sources)), *dict.fromkeys(map(publisher, sources))]
    unseen = dict(zip(names, fitted_without(every, start, [partial(_is_of, each) for each in names]), strict=True))
    errors = {}
    for source in sources:
        chosen = _of(every, source)
        errors[source] = _add(report, f"{source}, fitted without it", chosen, unseen[group(source)])
    _add_lengths(report, every, errors)
    _add_kinds(report, [(row, row.predicted(unseen[publisher(row.source)]) / row.seconds - 1) for row in every])
    report.notes.append("regret: of the plainest layout among ties; without ties, of the fastest predicted one")
    report.data["fitted"] = start
    report.notes.append("fitted on all: " + ", ".join(f"{name} {value:.3g}" for name, value in start.items()))
    apart = max(abs(value / start[name] - 1) for name, value in own_coefficients().items())
    report.notes.append(f"the planner's own coefficients differ from these by at most {apart:.1%}")
    _add_memory(report, [*memory_rows(), *memory_commands()])
    return report


def group(source: str) -> str:
    """The sources that are left out of a fit together: those of one program on one kind of device."""
    return GROUPED if source.startswith(GROUPED) else source


NVIDIA = ("2205.05198", "dgxc", "megatron", "nemo")


def publisher(source: str) -> str:
    """Who published a source. Steps that one publisher measured have errors in common, whatever the device."""
    name = source.partition("-")[0]
    return "nvidia" if name in NVIDIA else name


def _is_of(name: str, row: Row) -> bool:
    return name in (group(row.source), publisher(row.source))


def _add_kinds(report: Report, errors: Sequence[tuple[Row, float]]) -> None:
    """The errors of kinds of jobs, each row planned with coefficients that never saw a row of its publisher."""
    found = [Judged(kind_of(row.model, row.setup, row.cluster), row.source, error) for row, error in errors]
    promises = {str(kind): promised(kind, found) for kind in starmap(Kind, product(*_values(found)))}
    report.data["kinds"] = {kind: promise for kind, promise in sorted(promises.items()) if promise}
    held = [held_of(name, found) for name in dict.fromkeys(each.source for each in found)]
    report.data["held"] = {each["source"]: each for each in held}
    report.notes += [
        f"within what is promised without the publisher, {each['source']}: {each['held']} of {each['rows']}"
        for each in held
    ]
    known = [each for each in held if each["rows"]]
    report.notes.append(
        f"within it, of all: {sum(each['held'] for each in known) / sum(each['rows'] for each in known):.1%}, in the "
        f"mean over sources {fmean(each['held'] / each['rows'] for each in known):.1%}"
    )


class Judged(NamedTuple):
    """A step whose publisher the fit did not see."""

    kind: Kind
    source: str
    error: float


def _values(found: Sequence[Judged]) -> list[list[Any]]:
    """What the parts of kinds may be."""
    return [list(dict.fromkeys(part)) for part in zip(*(each.kind for each in found), strict=True)]


def held_of(source: str, found: Sequence[Judged]) -> dict[str, Any]:
    """How many rows of a source are within what the steps of other publishers promise of them, and of how many they
    promise something.
    """
    others = [each for each in found if publisher(each.source) != publisher(source)]
    most = {kind: promised(kind, others) for kind in {each.kind for each in found if each.source == source}}
    own = [abs(each.error) <= most[each.kind]["most"] for each in found if each.source == source and most[each.kind]]
    return {"source": source, "rows": len(own), "held": sum(own)}


def promised(kind: Kind, found: Sequence[Judged]) -> dict[str, float]:
    """What a plan of a kind says of its error, from the errors of at least two publishers; empty for fewer. The error
    of another one is taken to have Student's distribution. Each publisher is one observation, however many steps it
    measured, or NEAR of one if it measured near kinds only. The mean square over all jobs counts as POOLED of them.
    """
    every: defaultdict[str, list[float]] = defaultdict(list)
    same: defaultdict[str, list[float]] = defaultdict(list)
    near: defaultdict[str, list[float]] = defaultdict(list)
    for each in found:
        by = [every, *[near] * kind.is_near(each.kind), *[same] * (kind == each.kind)]
        for one in by:
            one[publisher(each.source)].append(each.error)
    if len(near) < 2:
        return {}
    used = {name: (1.0, same[name]) if name in same else (NEAR, errors) for name, errors in near.items()}
    squares = sum(weight * _square(errors) for weight, errors in used.values())
    whole = POOLED + sum(weight for weight, _ in used.values())
    spread = math.sqrt((POOLED * fmean(map(_square, every.values())) + squares) / whole)
    return {
        "rows": sum(len(errors) for _, errors in used.values()),
        "sources": len(used),
        "error": fmean(fmean(map(abs, errors)) for _, errors in used.values()),
        "most": STUDENT[min(len(used) - 1 + POOLED, len(STUDENT)) - 1] * spread,
    }


def _square(errors: Sequence[float]) -> float:
    return fmean(each**2 for each in errors)


def _add_lengths(report: Report, every: Sequence[Row], errors: Mapping[str, Sequence[float]]) -> None:
    """The errors of sharded jobs by the length of their sequences, with coefficients that never saw the source."""
    lengths: defaultdict[tuple[str, int], list[float]] = defaultdict(list)
    for source, found in errors.items():
        for row, error in zip(_of(every, source), found, strict=True):
            if row.setup.zero == 3:
                lengths[row.cluster.device.like, row.setup.sequence or row.model.tokens].append(error)
    report.data["lengths"] = [
        {"device": device, "tokens": tokens, "rows": len(found), "error": fmean(map(abs, found)), "bias": fmean(found)}
        for (device, tokens), found in sorted(lengths.items())
    ]
    report.notes += [
        f"sharded weights on {each['device']}, {each['tokens']} tokens: {each['error']:.1%}, bias {each['bias']:+.1%}"
        for each in report.data["lengths"]
    ]


def publish(report: Report) -> None:
    """Writes the tables of the documents, and the errors of similar jobs that plans print."""
    write_tables(report.data)


def allocator_shares() -> list[float]:
    """Of published logs: what the allocator took beyond what it had handed out, as a share of that."""
    with LOGS.open(encoding="utf-8") as file:
        return [float(each["reserved_mb"]) / float(each["allocated_mb"]) - 1 for each in csv.DictReader(file)]


def _of(every: Sequence[Row], source: str) -> list[Row]:
    return [row for row in every if row.source == source]


def _add(report: Report, label: str, chosen: Sequence[Row], known: Mapping[str, float]) -> list[float]:
    """Adds a line, and returns the errors of the rows."""
    predicted = np.array([row.predicted(known) for row in chosen])
    measured = np.array([row.seconds for row in chosen])
    errors = predicted / measured - 1
    found, ranks = regrets(chosen, predicted.tolist()), _correlations(chosen, predicted, measured)
    numbers: dict[str, Any] = {
        "rows": len(chosen),
        "error": fmean(abs(errors)),
        "largest": float(max(abs(errors))),
        "bias": fmean(errors),
        "correlation": fmean(ranks) if ranks else None,
        "regret": fmean(each.chosen for each in found) if found else None,
        "largest_regret": max(each.chosen for each in found) if found else None,
        "regret_without_ties": fmean(each.first for each in found) if found else None,
    }
    cells = ["" if value is None else f"{100 * value:.1f} %" for name, value in numbers.items() if name != "rows"]
    cells[3] = f"{numbers['correlation']:.3f}" if ranks else ""
    report.rows.append([label, str(len(chosen)), *cells])
    report.data["errors"][label] = numbers
    report.data[label] = {"predicted": predicted.tolist(), "measured": measured.tolist()}
    return [float(error) for error in errors]


def _correlations(chosen: Sequence[Row], predicted: np.ndarray, measured: np.ndarray) -> list[float]:
    """The rank correlation (Spearman's) of each job with several layouts."""
    jobs = (list(each.rows) for each in regrets(chosen, predicted.tolist()))
    ranks = ((predicted[job].argsort().argsort(), measured[job].argsort().argsort()) for job in jobs)
    return [float(np.corrcoef(planned, took)[0, 1]) for planned, took in ranks]


def _add_memory(report: Report, measured: Sequence[MeasuredBytes]) -> None:
    errors = [each.error for each in measured]
    report.data["memory"] = {"rows": len(errors), "error": fmean(map(abs, errors)), "largest": max(map(abs, errors))}
    shares = allocator_shares()
    report.notes.append(
        f"allowance for the allocator: {ALLOCATOR:.0%}; in {len(shares)} logs it took {min(shares):.1%} to "
        f"{max(shares):.1%}, in the median {median(shares):.1%}"
    )
    report.notes += [
        f"memory, {each.label}: planned {each.planned / 2**30:.1f} GiB, published {each.gib:.1f} GiB ({error:+.1%})"
        for each, error in zip(measured, errors, strict=True)
    ]
