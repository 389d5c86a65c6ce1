"""Draws schedules in motion, below each other on one time scale, as the picture of the README."""

from __future__ import annotations

import argparse
from pathlib import Path

import pipeflow
from pipeflow.draw import animated_svg


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("schedules", nargs="+", metavar="SCHEDULE", help="names that `pipeflow list` shows, or CSV files")
    add("--ranks", type=int, default=4, help="pipeline ranks (%(default)s)")
    add("--microbatches", type=int, default=8, help="microbatches (%(default)s)")
    add("--output", type=Path, default=Path("flow.svg"), metavar="FILE", help="the picture (%(default)s)")
    arguments = parser.parse_args()
    try:
        found = [schedule(name, arguments.ranks, arguments.microbatches) for name in arguments.schedules]
        arguments.output.write_text(animated_svg([*map(pipeflow.simulate, found)]), encoding="utf-8")
    except (pipeflow.UsageError, OSError) as error:
        parser.error(str(error))
    print(f"wrote {arguments.output}; a browser shows it")


def schedule(name: str, ranks: int, microbatches: int) -> pipeflow.Schedule:
    """The schedule of that name or in that file."""
    if name.endswith(".csv"):
        return pipeflow.Schedule.from_csv(Path(name).read_text(encoding="utf-8"), name=Path(name).stem)
    return pipeflow.make_schedule(name, ranks=ranks, microbatches=microbatches)


if __name__ == "__main__":
    main()
