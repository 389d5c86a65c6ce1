"""The command line: `python -m benchmarks [NAME ...] [--rounds N] [--save]`."""

from __future__ import annotations

import argparse
from importlib import import_module

NAMES = (
    "sleep",
    "compute",
    "zero_bubble",
    "plans",
    "links",
    "lengths",
    "one_rank",
    "one_gpu",
    "halves",
    "failure",
    "calls",
    "analysis",
    "search",
    "memory",
    "memory_plans",
    "optimizer_step",
    "offload_gpt",
    "recompute",
    "buffers",
    "tensor",
    "precision",
    "optimizers",
    "trainer",
    "lightning_loop",
    "planning_llama",
    "pipelining",
    "unmodified",
    "planner",
    "mixtures",
    "replan",
    "layouts",
    "explore",
    "explain",
    "explain_large",
    "checking",
    "checking_second",
    "checking_third",
    "checking_examples",
    "checking_large",
    "checking_clean",
    "checking_cost",
)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"which: {', '.join(NAMES)} (all unless given)")
    parser.add_argument("--rounds", type=int, help="how often every contender runs (the default differs)")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/NAME.json and .md")
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - set(NAMES):
        parser.error(f"unknown benchmark {', '.join(sorted(unknown))}; there are {', '.join(NAMES)}")
    for name in arguments.names or NAMES:
        benchmark = import_module(f"benchmarks.{name}")
        report = benchmark.run(arguments.rounds)
        report.show()
        if arguments.save:
            report.save()
            if hasattr(benchmark, "publish"):  # tables in documents
                benchmark.publish(report)


if __name__ == "__main__":
    main()
