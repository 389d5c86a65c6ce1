"""The command line: `python -m benchmarks [NAME ...] [--shown] [--rounds N] [--save] [--stale]`."""

from __future__ import annotations

import argparse
import os
import sys
import time
from importlib import import_module

from benchmarks import figures

ENGINE = ("core", "engine", "schedules")
TIMED = {
    "sleep": ENGINE,
    "compute": ENGINE,
    "zero_bubble": ENGINE,
    "tuning": (*ENGINE, "training"),
    "plans": (*ENGINE, "planning"),
    "links": (*ENGINE, "tools"),
    "lengths": ENGINE,
    "slices": (*ENGINE, "training"),
    "experts": ENGINE,
    "one_rank": ENGINE,
    "one_gpu": ENGINE,
    "halves": ENGINE,
    "failure": ENGINE,
    "going_on": ENGINE,
    "launch": ENGINE,
    "calls": ENGINE,
    "messages": ENGINE,
    "analysis": ("core", "schedules"),
    "search": ("core", "schedules"),
    "survivors": ENGINE,
    "memory": ("core", "schedules"),
    "memory_plans": ENGINE,
    "optimizer_step": ENGINE,
    "offload_gpt": ENGINE,
    "recompute": ENGINE,
    "buffers": ENGINE,
    "tensor": ENGINE,
    "convergence": (*ENGINE, "training"),
    "optimizers": ("training",),
    "gradients": (*ENGINE, "training"),
    "head": (*ENGINE, "training"),
    "trainer": (*ENGINE, "training"),
    "lightning_loop": (*ENGINE, "adapters"),
    "planning_llama": ("planning", "engine"),
    "pipelining": (*ENGINE, "adapters"),
    "unmodified": ENGINE,
    "planner": ("planning",),
    "regret": ("planning",),
    "mixtures": ("planning",),
    "replan": ("planning", "schedules"),
    "adaptive": (*ENGINE, "schedules"),
    "layouts": ("planning", "tools"),
    "explore": ("tools", "draw"),
    "explain": ("tools", "schedules"),
    "explain_large": ("tools",),
    "checking": ("checking",),
    "checking_second": ("checking",),
    "checking_third": ("checking",),
    "checking_fourth": ("checking",),
    "checking_examples": ("checking",),
    "checking_large": ("checking",),
    "checking_clean": ("checking",),
    "checking_cost": ("checking",),
}
"""The folders of pipeflow that each benchmark times: `--stale` compares them with the commit of its result."""


QUIET = 0.5
"""The load of the minute before, below which `--save` begins a benchmark."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"which: {', '.join(TIMED)} (all unless given)")
    parser.add_argument("--rounds", type=int, help="how often every contender runs (the default differs)")
    parser.add_argument("--save", action="store_true", help="wait for a quiet machine, write results/NAME.json and .md")
    parser.add_argument("--shown", action="store_true", help="those that README or a document names")
    parser.add_argument("--stale", action="store_true", help="list results older than the code that they time")
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - set(TIMED):
        parser.error(f"unknown benchmark {', '.join(sorted(unknown))}; there are {', '.join(TIMED)}")
    names = arguments.names or (figures.shown(tuple(TIMED)) if arguments.shown else list(TIMED))
    if arguments.stale:
        for name in names:
            if commit := figures.older(name, TIMED[name]):
                print(f"{name}: {commit}")
        return
    for name in names:
        benchmark = import_module(f"benchmarks.{name}")
        load = quiet_load() if arguments.save else os.getloadavg()[0]
        report = benchmark.run(arguments.rounds)
        report.show()
        if arguments.save:
            report.save(load)
            if hasattr(benchmark, "publish"):  # tables in documents
                benchmark.publish(report)
            figures.publish()


def quiet_load() -> float:
    """The load, once the machine is quiet."""
    if (load := os.getloadavg()[0]) >= QUIET:
        print(f"waiting until the load is below {QUIET}; it is {load:.2f}", file=sys.stderr)
    while (load := os.getloadavg()[0]) >= QUIET:
        time.sleep(5)
    return load


if __name__ == "__main__":
    main()
