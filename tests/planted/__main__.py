"""Plants faults in the package, one at a time, and runs the tests that go through their lines.

    python -m tests.planted record FOLDER                        which lines each test runs, and how long it takes
    python -m tests.planted choose FOLDER [--seconds N]          which of them `make test` leaves to `make test-all`
    python -m tests.planted try FOLDER [--count N] [--seed N]    how many of N faults are found

What is left out already is recorded, too. `try` runs it where the tests of `make test` find nothing, so that the result
says what leaving them out costs. A fault that no test finds may be none: some changes of code change
nothing that it does.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from pathlib import Path
from queue import SimpleQueue

from tests.covering import LEFT_OUT
from tests.planted.choice import Record, left_out
from tests.planted.faults import Fault, sample

ROOT = Path(__file__).parents[2]
SECONDS = 180.0
"""What the tests of one fault may take by their recorded times; the shortest come first."""
PYTEST = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]


def record(folder: Path) -> None:
    folder.mkdir(parents=True)
    arguments = ["-p", "tests.planted.recording", "--numprocesses", "2", "--dist", "worksteal"]
    environment = {**os.environ, "COVERED": str(folder), "OMP_NUM_THREADS": "1"}
    subprocess.run([*PYTEST, *arguments], cwd=ROOT, env=environment, check=False)


def selected() -> set[str]:
    """What `make test` runs."""
    listed = subprocess.run([*PYTEST, "--collect-only"], cwd=ROOT, capture_output=True, text=True, check=True)
    return {line for line in listed.stdout.splitlines() if "::" in line}


def run(copy: Path, tests: list[str]) -> str | None:
    """The first of the tests that fails in a copy of the repository; None if all pass. Tests that hang fail."""
    (copy / "tests.txt").write_text("\n".join(tests), encoding="utf-8")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [*PYTEST, "-x", "-m", "", "@tests.txt"]
    limit = 3 * SECONDS + 60
    try:
        done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired:
        return "hangs"
    if done.returncode == 0:
        return None
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return failed[0] if failed else f"exit {done.returncode}: {done.stdout[-300:]}{done.stderr[-300:]}"


def shortest(tests: list[str], seconds: dict[str, float]) -> list[str]:
    """The first of them, as many as may run for one fault."""
    totals = accumulate(seconds[test] for test in tests)
    return [test for test, total in zip(tests, totals, strict=True) if total < SECONDS]


def tried(folder: Path, count: int, seed: int, jobs: int) -> None:
    known, now = Record(folder), selected()
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    copies: SimpleQueue[Path] = SimpleQueue()
    with tempfile.TemporaryDirectory() as temporary, ThreadPoolExecutor(jobs) as pool:
        for job in range(jobs):
            copy = Path(temporary) / str(job)
            for name in filter(None, listed):
                (copy / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(ROOT / name, copy / name)
            copies.put(copy)

        def one(fault: Fault) -> dict[str, object]:
            copy = copies.get()
            path = copy / fault.file
            source = path.read_bytes()
            through = known.through(fault)
            found = list[str | None]()
            try:
                path.write_bytes(fault.planted(source))
                for part in ([test for test in through if test in now], [test for test in through if test not in now]):
                    tests = shortest(part, known.seconds)
                    found.append(next(filter(None, found), None) or (run(copy, tests) if tests else None))
            finally:
                path.write_bytes(source)
                copies.put(copy)
            told = {"fault": fault.told(source), "tests": len(through), "now": found[0], "before": found[1]}
            print(json.dumps(told), flush=True)
            return told

        every = list(pool.map(one, sample(ROOT, count, seed)))
    print(
        f"{sum(bool(each['before']) for each in every)} of {count} are found by the recorded tests, "
        f"{sum(bool(each['now']) for each in every)} by those that `make test` runs; "
        f"{sum(not each['tests'] for each in every)} are in lines that no recorded test runs"
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.planted", description=__doc__.partition("\n")[0])
    what = parser.add_subparsers(dest="what", required=True)
    recording = what.add_parser("record")
    choosing = what.add_parser("choose")
    choosing.add_argument("--seconds", type=float, default=1000.0, help="of recorded time that `make test` may take")
    trying = what.add_parser("try")
    trying.add_argument("--count", type=int, default=200)
    trying.add_argument("--seed", type=int, default=0)
    trying.add_argument("--jobs", type=int, default=2)
    for each in (recording, choosing, trying):
        each.add_argument("folder", type=Path)
    given = parser.parse_args()
    if given.what == "record":
        record(given.folder.absolute())
    elif given.what == "choose":
        LEFT_OUT.write_text(
            "".join(f"{test}\n" for test in left_out(Record(given.folder), given.seconds)), encoding="utf-8"
        )
    else:
        tried(given.folder, given.count, given.seed, given.jobs)


if __name__ == "__main__":
    main()
