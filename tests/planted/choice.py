"""Which tests `make test` runs: all short ones, and of the others those that cover most in the time that is left."""

from __future__ import annotations

import heapq
import json
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path

from tests.planted.faults import Fault

SHORT = 0.2
"""Seconds, as recorded: shorter tests are never left out."""
OFTEN = 3
"""How many tests of a line are worth their time; each counts half as much as the one before."""


class Record:
    """Which tests go through a line, and the seconds that each takes."""

    def __init__(self, folder: Path) -> None:
        from coverage import CoverageData

        self.tests: defaultdict[tuple[str, int], set[str]] = defaultdict(set)
        self.seconds: dict[str, float] = {}
        for path in folder.glob("*.times"):
            for line in path.read_text(encoding="utf-8").splitlines():
                name, seconds = json.loads(line)
                self.seconds[name] = seconds
        for path in folder.glob("*.lines"):
            data = CoverageData(basename=str(path))
            data.read()
            for file in data.measured_files():
                name = "pipeflow/" + file.rpartition("/pipeflow/")[2]
                for number, tests in data.contexts_by_lineno(file).items():
                    self.tests[name, number].update(tests)

    def through(self, fault: Fault) -> list[str]:
        """The shortest first."""
        return sorted(self.tests[fault.file, fault.line] & set(self.seconds), key=lambda test: self.seconds[test])


def left_out(record: Record, seconds: float) -> list[str]:
    """The tests that are left out if all others may take so many seconds. If all cases of a test are left out, its name
    stands for them.
    """
    lines: defaultdict[str, list[tuple[str, int]]] = defaultdict(list)
    for line, tests in record.tests.items():
        for test in tests & record.seconds.keys():
            lines[test].append(line)
    covered: Counter[tuple[str, int]] = Counter()
    kept = {test for test, took in record.seconds.items() if took < SHORT or not lines[test]}
    for test in kept:
        covered.update(lines[test])

    def worth(test: str) -> float:
        gain = sum(0.5 ** covered[line] for line in lines[test] if covered[line] < OFTEN)
        return gain / record.seconds[test]

    left = seconds - sum(record.seconds[test] for test in kept)
    heap = [(-worth(test), test) for test in record.seconds.keys() - kept]
    heapq.heapify(heap)
    while heap and left > 0:
        _, test = heapq.heappop(heap)
        now = worth(test)
        if heap and now < -heap[0][0]:  # worth less since others were taken
            heapq.heappush(heap, (-now, test))
        elif now:
            kept.add(test)
            covered.update(lines[test])
            left -= record.seconds[test]
    return _joined(record.seconds.keys() - kept, {_function(test) for test in kept})


def _joined(tests: Iterable[str], partly: set[str]) -> list[str]:
    return sorted({test if _function(test) in partly else _function(test) for test in tests})


def _function(test: str) -> str:
    return test.partition("[")[0]
