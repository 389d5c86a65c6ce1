"""The planner beside published training steps: its error, its ranking of layouts and their regret, with its own
coefficients and with those that are fitted without the rows that they predict. It takes minutes, for the fits.

Regret: the layout that the planner takes for the fastest, by how much it is slower than the fastest measured one of the
same task, which is a model, a number of devices and a batch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict
from statistics import fmean

import numpy as np

from benchmarks.measured_steps import MeasuredBytes, Row, memory_rows, rows
from benchmarks.planner_fit import EXPECTED, fitted, fitted_each
from benchmarks.report import Report
from pipeflow.planning.efficiency import PUBLISHED, Efficiency

TIE = 0.02  # times that differ by less rank as equal: the layout with fewer tensor ranks is taken then
COLUMNS = ["", "rows", "mean error", "largest", "bias", "rank corr.", "regret", "largest", "regret, ties"]


def run(rounds: int | None = None) -> Report:
    every = rows()
    sources = list(dict.fromkeys(row.source for row in every))
    report = Report("planner", "planner: predicted and published seconds of training steps", COLUMNS)
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
    report.notes.append(f"ties: of layouts within {TIE:.0%} of the fastest, the one with the fewest tensor ranks")
    report.notes.append("fitted on all: " + ", ".join(f"{name} {getattr(start, name):.3g}" for name in EXPECTED))
    apart = max(abs(getattr(PUBLISHED, name) / getattr(start, name) - 1) for name in EXPECTED)
    report.notes.append(f"the planner's own coefficients differ from these by at most {apart:.1%}")
    report.notes += map(_memory_note, memory_rows())
    return report


def _of(every: Sequence[Row], source: str) -> list[Row]:
    return [row for row in every if row.source == source]


def _add(report: Report, label: str, chosen: Sequence[Row], efficiency: Efficiency) -> None:
    known = asdict(efficiency)
    _add_times(report, label, chosen, lambda row: row.predicted(known))


def _add_times(report: Report, label: str, chosen: Sequence[Row], predict: Callable[[Row], float]) -> None:
    predicted = np.array([predict(row) for row in chosen])
    measured = np.array([row.seconds for row in chosen])
    errors = predicted / measured - 1
    regrets, tied, ranks = _regrets(chosen, predicted, measured)
    shown = [fmean(abs(errors)), max(abs(errors)), fmean(errors)]
    shown += [fmean(ranks), fmean(regrets), max(regrets), fmean(tied)] if regrets else []
    cells = [f"{100 * value:.1f} %" for value in shown]
    if regrets:
        cells[3] = f"{shown[3]:.3f}"
    report.rows.append([label, str(len(chosen)), *cells, *["-"] * (len(COLUMNS) - 2 - len(cells))])
    report.data[label] = {"predicted": predicted.tolist(), "measured": measured.tolist()}


def _regrets(
    chosen: Sequence[Row], predicted: np.ndarray, measured: np.ndarray
) -> tuple[list[float], list[float], list[float]]:
    """Per task with several layouts: the regret, that with ties broken, and the rank correlation (Spearman's)."""
    tasks: defaultdict[object, list[int]] = defaultdict(list)
    for index, row in enumerate(chosen):
        tasks[row.task].append(index)
    regrets, tied, ranks = [], [], []
    for indices in tasks.values():
        if len(indices) < 2:
            continue
        times, took = predicted[indices], measured[indices]
        regrets.append(took[times.argmin()] / took.min() - 1)
        near = [index for index in indices if predicted[index] <= times.min() * (1 + TIE)]
        first = min(near, key=lambda index: (chosen[index].setup.tensor, chosen[index].pipeline, predicted[index]))
        tied.append(measured[first] / took.min() - 1)
        ranks.append(float(np.corrcoef(times.argsort().argsort(), took.argsort().argsort())[0, 1]))
    return regrets, tied, ranks


def _memory_note(row: MeasuredBytes) -> str:
    planned = row.planned / 2**30
    return f"memory, {row.label}: planned {planned:.1f} GiB, published {row.gib:.1f} GiB ({planned / row.gib - 1:+.1%})"
