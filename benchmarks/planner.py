"""The planner beside published training steps: its error, its ranking of layouts and their regret, with its own
coefficients and with those that are fitted without the rows that they predict. It takes minutes, for the fits. With
--save it also writes the table of docs/planning.md.

Regret: the layout that the search would list first, by how much it is slower than the fastest measured one of the same
task, which is a model, a number of devices and a batch.
"""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict
from statistics import fmean, median
from typing import Any

import numpy as np

from benchmarks.measured_steps import DATA, MeasuredBytes, Row, memory_rows, rows
from benchmarks.planner_fit import EXPECTED, fitted, fitted_each
from benchmarks.planner_tables import write_tables
from benchmarks.report import Report
from pipeflow.planning.efficiency import PUBLISHED, Efficiency
from pipeflow.planning.layouts import ranking
from pipeflow.planning.rank_memory import ALLOCATOR

COLUMNS = ["", "rows", "mean error", "largest", "bias", "rank corr.", "regret", "largest", "regret without ties"]
LOGS = DATA.with_name("allocator_logs.csv")


def run(rounds: int | None = None) -> Report:
    every = rows()
    sources = list(dict.fromkeys(row.source for row in every))
    report = Report("planner", "planner: predicted and published seconds of training steps", COLUMNS)
    report.data["errors"] = {}
    for source in sources:
        _add(report, f"{source}", _of(every, source), PUBLISHED)
    start = fitted(every)
    without = [[row for row in every if row.source != source] for source in sources]
    models = list(dict.fromkeys(row.model for row in _of(every, "vtrain-single")))
    within = [[row for row in every if row.source == "vtrain-single" and row.model != model] for model in models]
    found = fitted_each([*without, *within], start)
    for source, efficiency in zip(sources, found, strict=False):
        _add(report, f"{source}, fitted without it", _of(every, source), efficiency)
    chosen = dict(zip(models, found[len(sources) :], strict=True))
    single = _of(every, "vtrain-single")
    _add_times(
        report, "vtrain-single, fitted without the model", single, lambda row: row.predicted(asdict(chosen[row.model]))
    )
    report.notes.append("regret: of the layout that the search lists first; without ties, of the fastest predicted one")
    report.notes.append("fitted on all: " + ", ".join(f"{name} {getattr(start, name):.3g}" for name in EXPECTED))
    apart = max(abs(getattr(PUBLISHED, name) / getattr(start, name) - 1) for name in EXPECTED)
    report.notes.append(f"the planner's own coefficients differ from these by at most {apart:.1%}")
    _add_memory(report, memory_rows())
    return report


def publish(report: Report) -> None:
    """Writes the tables of the documents."""
    write_tables(report.data)


def allocator_shares() -> list[float]:
    """Of published logs: what the allocator took beyond what it had handed out, as a share of that."""
    with LOGS.open() as file:
        return [float(each["reserved_mb"]) / float(each["allocated_mb"]) - 1 for each in csv.DictReader(file)]


def _of(every: Sequence[Row], source: str) -> list[Row]:
    return [row for row in every if row.source == source]


def _add(report: Report, label: str, chosen: Sequence[Row], efficiency: Efficiency) -> None:
    known = asdict(efficiency)
    _add_times(report, label, chosen, lambda row: row.predicted(known))


def _add_times(report: Report, label: str, chosen: Sequence[Row], predict: Callable[[Row], float]) -> None:
    predicted = np.array([predict(row) for row in chosen])
    measured = np.array([row.seconds for row in chosen])
    errors = predicted / measured - 1
    regrets, plain, ranks = _regrets(chosen, predicted, measured)
    numbers: dict[str, Any] = {
        "rows": len(chosen),
        "error": fmean(abs(errors)),
        "largest": float(max(abs(errors))),
        "bias": fmean(errors),
        "correlation": fmean(ranks),
        "regret": fmean(regrets),
        "largest_regret": float(max(regrets)),
        "regret_without_ties": fmean(plain),
    }
    cells = [f"{100 * value:.1f} %" for name, value in numbers.items() if name != "rows"]
    cells[3] = f"{numbers['correlation']:.3f}"
    report.rows.append([label, str(len(chosen)), *cells])
    report.data["errors"][label] = numbers
    report.data[label] = {"predicted": predicted.tolist(), "measured": measured.tolist()}


def _regrets(
    chosen: Sequence[Row], predicted: np.ndarray, measured: np.ndarray
) -> tuple[list[float], list[float], list[float]]:
    """Per task with several layouts: the regret of what the search would list first, that of the fastest predicted
    one, and the rank correlation (Spearman's).
    """
    tasks: defaultdict[object, list[int]] = defaultdict(list)
    for index, row in enumerate(chosen):
        tasks[row.task].append(index)
    regrets, plain, ranks = [], [], []
    for indices in tasks.values():
        if len(indices) < 2:
            continue
        times, took = predicted[indices], measured[indices]
        first = ranking((float(predicted[index]), chosen[index].layout) for index in indices)[0][1]
        [picked] = (index for index in indices if chosen[index].layout is first)
        regrets.append(measured[picked] / took.min() - 1)
        plain.append(took[times.argmin()] / took.min() - 1)
        ranks.append(float(np.corrcoef(times.argsort().argsort(), took.argsort().argsort())[0, 1]))
    return regrets, plain, ranks


def _add_memory(report: Report, measured: Sequence[MeasuredBytes]) -> None:
    errors = [each.planned / 2**30 / each.gib - 1 for each in measured]
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
