"""`pipeflow check` on jobs without a fault: random models, layouts and schedules of six loops, float32 and bfloat16.
How many are called different? `--rounds` is the number of pairs of each loop.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from benchmarks.checked.clean import ENGINES, TOGETHER, pairs, sizes_of
from benchmarks.report import Report

COLUMNS = ["engine", "pairs", "bfloat16", "false alarms"]


def run(rounds: int | None = None) -> Report:
    report = Report("checking_clean", "pipeflow check: random pairs without a fault", COLUMNS)
    total = 0
    for engine in ENGINES:
        seeds = list(range(rounds or 17))
        alarms = coarse = 0
        for start in range(0, len(seeds), TOGETHER):
            with tempfile.TemporaryDirectory() as folder:
                found = pairs(engine, seeds[start : start + TOGETHER], Path(folder))
            alarms += sum(not result.alike for result in found.values())
            coarse += sum("bfloat16" in str(sizes_of(seed).dtype) for seed in found)
        name = engine.__name__.rpartition(".")[2]
        report.rows.append([name, str(len(seeds)), str(coarse), str(alarms)])
        report.data[name] = alarms
        total += alarms
    report.notes.append(f"target: 0 false alarms of 100; found {total} of {len(ENGINES) * (rounds or 17)}")
    return report
